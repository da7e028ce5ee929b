"""Experts: modules with the weights of all experts of a mixture, which plans can deal out.

They are found by their form: tensors that number the experts in their first dim, and a call with
tokens, the numbers of each token's experts, and the weights of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from superscaler_core.known import Known
from superscaler_core.ops.experts import call_experts
from superscaler_core.ops.modules import ModuleCall, enter, pickled, state_of

ROWS = "t h^, t k^, t k^ -> t h^"
"""The annotation of the experts of transformers: they take tokens, the experts of each token, and
the weights of these experts."""

MOST_BYTES = 1 << 26
"""Most bytes of two experts up to which modules of unknown classes are tried. 64 MiB."""

Numbered = frozenset[str]
"""The names of the tensors of a module that number the experts in their first dim."""


def may_be_experts(module: nn.Module) -> bool:
    """Whether a module has weights for several experts of its own, and beside them only vectors."""
    is_inner = all(x.dim() < 2 for inner in module.children() for x in state_of(inner).values())
    return is_inner and num_experts_of(module) > 1


def num_experts_of(module: nn.Module) -> int:
    """The first dim of all its tensors with three dims; 0 if there are none or they differ."""
    sizes = {x.shape[0] for x in module.parameters(recurse=False) if x.dim() == 3}
    return sizes.pop() if len(sizes) == 1 else 0


def numbered(module: nn.Module, given: Sequence[Tensor]) -> Numbered:
    """The tensors of a module that number the experts, if ``given`` is a call of experts.

    A vector of as many elements as a weight has features may be one of either.
    """
    num = num_experts_of(module)
    if num < 2 or len(given) != 3 or not may_be_experts(module):
        return frozenset()
    x, ids, weights = given
    is_call = (
        x.dim() == ids.dim() == weights.dim() == 2
        and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        and x.is_floating_point() and weights.is_floating_point()
        and ids.shape == weights.shape and len(x) == len(ids)
    )  # fmt: skip
    state = state_of(module)
    features = {n for tensor in state.values() if tensor.dim() == 3 for n in tensor.shape[1:]}
    if not is_call or (num in features and any(x.shape == (num,) for x in state.values())):
        return frozenset()
    return frozenset(name for name, x in state.items() if x.dim() and x.shape[0] == num)


def adds_up(call: ModuleCall, given: Sequence[Tensor], names: Numbered) -> bool:
    """Whether the parts of two of a module's experts add up, and its tokens are independent.

    It is tried with small random numbers. Experts of more than ``MOST_BYTES`` are not tried.
    """
    text = pickled(call)
    key = text, tuple((tuple(x.shape[1:]), x.dtype) for x in given)
    return (
        _KNOWN.of(key, lambda: _adds_up(call, given, names))
        if text
        else _adds_up(call, given, names)
    )


_KNOWN: Known[Hashable, bool] = Known(64)
"""Results of ``adds_up`` so far, by the pickled call and the shapes and dtypes of its tensors."""


def _adds_up(call: ModuleCall, given: Sequence[Tensor], names: Numbered) -> bool:
    like = state_of(call.skeleton)
    shapes = {name: (2, *x.shape[1:]) if name in names else x.shape for name, x in like.items()}
    if sum(like[name].nbytes // len(like[name]) * 2 for name in names) > MOST_BYTES:
        return False
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tuple(shape), generator=generator).mul(0.1).to(like[name].dtype)
        for name, shape in shapes.items()
    }
    num_tokens, top = 6, given[1].shape[1]
    x = torch.randn(num_tokens, given[0].shape[1], generator=generator).to(given[0].dtype)
    ids = torch.randint(0, 2, (num_tokens, top), generator=generator).to(given[1].dtype)
    weights = torch.rand(num_tokens, top, generator=generator).to(given[2].dtype)
    key, num = enter(call), num_experts_of(call.skeleton)

    def run(lo: int, hi: int, rows: slice) -> Tensor:
        mine = [value[lo:hi] if name in names else value for name, value in state.items()]
        tensors = [x[rows], ids[rows], weights[rows], *mine]
        shape = [(len(tensors[0]), x.shape[1])]
        return call_experts(key, tensors, shape, first=lo, num_here=hi - lo, num_experts=num)

    every = slice(None)
    try:
        with torch.no_grad():
            whole = run(0, 2, every)
            halves = run(0, 1, every) + run(1, 2, every)
            rows = torch.cat([run(0, 2, slice(0, 2)), run(0, 2, slice(2, None))])
    except Exception:  # the module is something else
        return False
    close = 1e-4 if x.dtype in (torch.float32, torch.float64) else 5e-2
    size = whole.abs().max().item() + 1e-30
    return all((found - whole).abs().max().item() < close * size for found in (halves, rows))


def annotated(rows: str, state: Mapping[str, Sequence[int]], names: Numbered) -> str:
    """The annotation of a call of a module, given that of its arguments and results.

    Args:
        rows: of arguments and results.
        state: shapes of the module's parameters and buffers, by name.
        names: those that number the experts, whose loop is ``expert+``.

    >>> annotated("b h^ -> b h^", {"weight": (4, 6), "scale": ()}, frozenset())
    'b h^, w0_4^ w1_6^, () -> b h^'
    """
    left, right = rows.split("->")
    words = (
        " ".join(
            "expert+" if not i and name in names else f"w{i}_{n}^" for i, n in enumerate(shape)
        )
        for name, shape in state.items()
    )
    return f"{', '.join([left.strip(), *(word or '()' for word in words)])} ->{right}"
