"""Pointwise functions: recognises a ``torch.autograd.Function`` that computes each element alone.

Such a function, as a straight-through estimator, can be cut anywhere. It is recognised by the ops
that its forward and backward call for shapes of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_MORE = (0, 1, 4)
"""Numbers that are added to all sizes, one in each run: arguments that depend on a size differ."""

_ALIKE = {
    "aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::ones_like",
    "aten::zeros_like", "aten::empty_like", "aten::full_like", "aten::square", "aten::log_sigmoid",
}  # fmt: skip
"""Calls that are pointwise although torch does not tag them as pointwise."""

_RESHAPES = {"aten::view", "aten::_unsafe_view", "aten::expand"}
"""Calls that are pointwise if they keep the shape."""


def is_pointwise(
    apply: Callable[..., Any], tensors: Sequence[tuple[Sequence[int], torch.dtype]]
) -> bool:
    """Whether a function and its gradient compute an element only from elements at its position.

    ``apply`` gets ``tensors``, given by shapes, which are equal, and dtypes; it returns one tensor
    or a tuple.
    """
    runs = [_calls(apply, tensors, more) for more in _MORE]
    return runs[0] is not None and all(run == runs[0] for run in runs)


def _calls(
    apply: Callable[..., Any], tensors: Sequence[tuple[Sequence[int], torch.dtype]], more: int
) -> list[tuple[Any, ...]] | None:
    """The ops that a function calls, with their non-tensor arguments; None if not pointwise."""
    made = [
        torch.empty([size + more for size in shape], dtype=dtype, device="meta")
        for shape, dtype in tensors
    ]
    for tensor in made:
        tensor.requires_grad_(tensor.is_floating_point())
    recorder = _Recorder(made[0].shape)
    try:
        with torch.enable_grad(), recorder:
            result = apply(*made)
            results = result if isinstance(result, tuple) else (result,)
            learned = [tensor for tensor in results if tensor.requires_grad]
            if learned:
                wanted = [tensor for tensor in made if tensor.requires_grad]
                grads = [torch.empty_like(tensor) for tensor in learned]
                torch.autograd.grad(learned, wanted, grads, allow_unused=True)
    except Exception:
        # The function needs values, which tensors on the meta device do not have.
        return None
    is_same = all(tensor.shape == made[0].shape for tensor in results)
    return recorder.calls if is_same and recorder.is_pointwise else None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records calls, and whether all are pointwise in one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.is_pointwise = shape, True
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, result))
        shapes = {leaf.shape for leaf in leaves if isinstance(leaf, Tensor)}
        name = func._schema.name
        if name in _RESHAPES and shapes == {self.shape}:
            return result
        self.is_pointwise &= torch.Tag.pointwise in func.tags or name in _ALIKE
        # A scalar that the function computes, such as a scale, is the same for all elements.
        self.is_pointwise &= shapes <= {self.shape, torch.Size([])}
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.calls.append((str(func), *map(repr, others)))
        return result
