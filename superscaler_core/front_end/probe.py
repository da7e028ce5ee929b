"""Probe: runs a module that cannot be traced, to learn the shapes of its results.

Large products of matrices are not computed: their shapes and operations are known anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from superscaler_core.errors import CaptureError
from superscaler_core.front_end.state import State
from superscaler_core.known import Known
from superscaler_core.ops.modules import ModuleCall, pickled, state_of, tensors_of
from superscaler_core.rules.calls import is_literal, running

_WEIGHT = 0.02
"""The value of all weights: most functions of it are finite, and no result is zero."""


_LARGE = 1 << 16
"""Elements of tensors up to which products are computed."""


class NotOneOpError(Exception):
    """A module cannot be one op, but a module around it may be.

    Attributes:
        path: path of the module; set by the caller that knows it.
    """

    path = ""


@dataclass(frozen=True)
class Probed:
    """The properties of a call that running it has shown.

    Attributes:
        call: the call, completed with the dtypes of its results and the bytes that it keeps.
        results: shapes and dtypes of its results.
        returned: the returned value; its tensors stand for the results, in order.
        flops: floating-point operations of its products.
    """

    call: ModuleCall
    results: list[tuple[tuple[int, ...], torch.dtype]]
    returned: Any
    flops: float


def probe(call: ModuleCall, tensors: Sequence[Tensor]) -> Probed:
    """Run a call twice, with different values of its arguments, to learn its properties.

    Of its tensors only shapes and dtypes matter.

    Raises:
        NotOneOpError: the shapes of its results depend on values, or it returns objects that are
            neither tensors nor literals.
        CaptureError: the call does what an op cannot: it draws random numbers, modifies a tensor,
            or keeps state from one call to the next.
    """
    with outside_of_tracing():
        # Equal layers are run once.
        text = pickled(call)
        key = text, tuple((tuple(x.shape), x.dtype) for x in tensors)
        return _KNOWN.of(key, lambda: _probe(call, tensors)) if text else _probe(call, tensors)


_KNOWN: Known[Hashable, Probed] = Known(64)
"""Results of ``probe`` so far, by the pickled call and the shapes and dtypes of its tensors."""


def _probe(call: ModuleCall, tensors: Sequence[Tensor]) -> Probed:
    name, num_args = type(call.skeleton).__name__, len(tensors) - len(call.names)
    state, own = State(call.skeleton), state_of(call.skeleton)

    def turns(least: int) -> Iterator[Probed]:
        for turn in range(2):
            args = [_argument(x, turn, least) for x in tensors[:num_args]]
            with state.watched():
                yield _run(call, [*args, *(_weight(x) for x in own.values())], num_args)

    try:
        found = list(turns(0))
    except RuntimeError:  # Small integers are valid indices, but a count may not be zero.
        found = list(turns(1))
    if state.changed:
        raise CaptureError(
            f"{name} keeps something from one call to the next in "
            f"{', '.join(sorted(state.changed))}, which a program does not; return it instead."
        )
    first, second = found
    if first.results != second.results or _rest(first.returned) != _rest(second.returned):
        raise NotOneOpError("its results have shapes, or numbers, that depend on values")
    if not all(map(is_literal, _rest(first.returned)[0])):
        raise NotOneOpError("it returns what is no tensor")
    return first


def _run(call: ModuleCall, given: Sequence[Tensor], num_args: int) -> Probed:
    versions = [x._version for x in given]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), _Kept(keep, lambda tensor: tensor), _Shapes() as shapes:
        returned = call.run(call.skeleton, given)
    if [x._version for x in given] != versions:
        raise CaptureError(
            f"{type(call.skeleton).__name__} changes what it is given, or a buffer, in place; "
            "return it instead."
        )
    results = tensors_of(returned)
    for tensor in given:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    share = sum(kept.values()) / max(sum(x.nbytes for x in given[:num_args]), 1)
    dtypes = tuple(x.dtype for x in results)
    made = replace(call, dtypes=dtypes, kept_bytes=share)
    forms = [(tuple(x.shape), x.dtype) for x in results]
    empty = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), returned)
    return Probed(made, forms, empty, shapes.flops)


def _rest(returned: Any) -> tuple[list[Any], Any]:
    leaves, form = pytree.tree_flatten(returned)
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)], form


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Inside this context, torch computes, although a model is being traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), running():
        yield


def _argument(like: Tensor, turn: int, least: int) -> Tensor:
    """An argument: in turn 0 positive or the least integers, in turn 1 negative or larger integers.

    So a number of rows that depends on values usually differs between the turns.
    """
    shape = tuple(like.shape)
    if not all(isinstance(n, int) for n in shape):
        raise NotOneOpError("the shape of what it takes depends on values")
    generator = torch.Generator().manual_seed(turn)
    if not like.is_floating_point():
        made = torch.randint(0, 1 + turn, shape, generator=generator)
        return (made if like.dtype == torch.bool else made + least).to(like.dtype)
    made = torch.randn(shape, generator=generator).abs().to(like.dtype) * (1.0 - 2.0 * turn)
    # A function may write in place into a computed tensor, but not into a leaf.
    return made.requires_grad_().clone()


def _weight(like: Tensor) -> Tensor:
    """A weight that takes no memory."""
    made = torch.full((), _WEIGHT).to(like.dtype).expand(tuple(like.shape))
    is_trained = isinstance(like, nn.Parameter) and like.requires_grad
    return made.requires_grad_() if is_trained else made


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)


class _Kept(saved_tensors_hooks):
    """Hooks with a class of their own, because ``effects`` refuses torch's class in a forward."""


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of products, gives zeros for large products, refuses random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"it cannot be traced, and draws random numbers ({func}), which devices would draw "
                "differently; pass them to the model as an input, or move dropout out of it."
            )
        count = flop_registry.get(func._overloadpacket)
        is_small = all(prod(x.shape) <= _LARGE for x in args if isinstance(x, Tensor))
        if count is None and "grouped_mm" not in func.__name__:
            result = func(*args, **kwargs)
        elif is_small:
            # Grouped products take no weights whose elements share memory.
            given = pytree.tree_map_only(Tensor, Tensor.contiguous, args)
            result = func(*given, **kwargs)
        else:
            given, named = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
            result = pytree.tree_map_only(Tensor, _zeros, func(*given, **named))
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        return result
