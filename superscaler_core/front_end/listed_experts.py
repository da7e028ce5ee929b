"""Listed experts: modules around ``StackedExperts``, as one op that plans can deal out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from superscaler_core.ops.experts import call_listed, stacked_names
from superscaler_core.ops.modules import ModuleCall, enter, state_of

_CLOSE = 1e-3
"""Parts add up within this share of the largest value, in float32."""


def is_around_experts(module: nn.Module) -> bool:
    """Whether a module has ``StackedExperts``, and does not only hold them."""
    return bool(stacked_names(module)) and type(module).forward is not nn.Module.forward


def rows_of_listed(call: ModuleCall, given: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """The annotation of a call's arguments and results, if the parts of its experts add up.

    It is tried with numbers: small random ones in place of arguments and of small weights, and in
    place of experts' weights one number for each expert, which takes no memory. If the first dim
    is that of samples, plans can cut it too.

    Args:
        call: the call of a module around experts.
        given: its tensors.
        results: what it returns, without values.

    Returns:
        The annotation; empty if its parts do not add up.
    """
    if not given or not all(x.is_floating_point() for x in results):
        return ""
    tensors = [_argument(x) for x in given]
    names = stacked_names(call.skeleton)
    state = {n: _weight(x, n in names) for n, x in state_of(call.skeleton).items()}
    num = len(state[min(names)])
    key = enter(call)

    def run(lo: int, hi: int, rows: slice | None = None) -> list[Tensor]:
        mine = [x[lo:hi] if name in names else x for name, x in state.items()]
        own = [x if rows is None or not _is_row(x, given) else x[rows] for x in tensors]
        share = 1.0 if rows is None else len(own[0]) / len(tensors[0])
        shapes = [(round(x.shape[0] * share), *x.shape[1:]) if x.dim() else () for x in results]
        found = call_listed(key, [*own, *mine], shapes, first=lo, num_here=hi - lo, num_experts=num)
        return [found] if isinstance(found, Tensor) else list(found)

    half = (num + 1) // 2
    try:
        with torch.no_grad():
            whole = run(0, num)
            parts = zip(run(0, half), run(half, num), strict=True)
            if not _are_close([a + b for a, b in parts], whole):
                return ""
            one = _annotated(given, results)
            if not one or len(given[0]) < 2:
                return _annotated(given, results, cut=False)
            rows = zip(run(0, num, slice(0, 1)), run(0, num, slice(1, None)), strict=True)
            is_cut = _are_close([torch.cat(pair) for pair in rows], whole)
    except Exception:  # the module is something else, or its rows are no samples
        return ""
    return one if is_cut else _annotated(given, results, cut=False)


def _annotated(given: Sequence[Tensor], results: Sequence[Tensor], *, cut: bool = True) -> str:
    """An annotation whose loop ``b`` is the first dim; empty if a result does not have it."""
    rows, second = given[0].shape[0], given[0].shape[1] if given[0].dim() > 1 else 1
    words = []
    for tensor in (*given, *results):
        dims = [f"d{i}_{n}^" for i, n in enumerate(tensor.shape)]
        is_result = any(tensor is each for each in results)
        if cut and dims and tensor.shape[0] == rows and (is_result or _is_row(tensor, given)):
            dims[0] = "b"
        elif cut and dims and is_result and tensor.shape[0] == rows * second:
            # Tokens of all samples in one dim, such as scores of experts.
            dims[0] = f"(b d1_{second}^)"
        elif cut and is_result:
            return ""
        words.append(" ".join(dims) or "()")
    return f"{', '.join(words[: len(given)])} -> {', '.join(words[len(given) :])}"


def _is_row(tensor: Tensor, given: Sequence[Tensor]) -> bool:
    return bool(tensor.dim()) and tensor.shape[0] == given[0].shape[0]


def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return all(
        a.shape == b.shape and (a - b).abs().max() <= _CLOSE * b.abs().max() for a, b in pairs
    )


def _argument(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = tuple(like.shape)
    if like.is_floating_point():
        return torch.randn(shape, generator=generator).to(like.dtype)
    made = torch.randint(0, 2, shape, generator=generator)
    return made.to(like.dtype)


def _weight(like: Tensor, is_stacked: bool) -> Tensor:
    shape = tuple(like.shape)
    if is_stacked:
        numbers = torch.linspace(0.01, 0.03, shape[0]).view(-1, *[1] * (len(shape) - 1))
        return numbers.to(like.dtype).expand(shape)
    if like.numel() > 1 << 22 or not like.is_floating_point():
        return torch.full((), 0.01).to(like.dtype).expand(shape)
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(shape, generator=generator).mul(0.1).to(like.dtype)
