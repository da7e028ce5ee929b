"""Gradient: a call as a node of the autograd graph; its backward is a call of the adjoint.

All ranks of the two layouts have such a node, including ranks that have no tensor on one side. So
all of them take part in the backward pass, which is collective too (docs/gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from rvdcomm.errors import LayoutError


class WithAdjoint(Protocol):
    """The interface of a call that its node needs; a ``Redistributor`` implements it."""

    what: str
    dtype: torch.dtype

    @property
    def adjoint(self) -> Any:
        """The call that carries the gradient back, which has this interface too."""

    @property
    def spans_groups(self) -> bool:
        """Whether some ranks have a tensor on one side only."""

    @property
    def is_in_src(self) -> bool:
        """Whether this rank passes a tensor."""

    @property
    def is_in_dst(self) -> bool:
        """Whether this rank gets a result."""

    def check(self, tensor: Any, out: Any) -> None:
        """Raise for a tensor that this rank cannot pass."""

    def running(self, tensor: Tensor | None) -> Callable[[], Tensor | None]:
        """A function that makes the call."""


def with_grad(tensor: Tensor | None, run: Callable[[], Tensor | None], there: WithAdjoint) -> Any:
    """The result of ``run``, which is a call of ``there``, as a node of the autograd graph.

    On a rank whose tensor does not require grad, the input of the node is a new leaf that the
    caller does not see. On a rank without a result, the output of the node is a scalar of 0, whose
    ``backward`` takes part in the adjoint.
    """
    if tensor is None:
        tensor = torch.zeros((), dtype=there.dtype, device="cpu")
    leaf = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
    return Redistribute.apply(leaf, run, there, there.adjoint)  # type: ignore[no-untyped-call]


class Redistribute(torch.autograd.Function):
    """A call as a node: ``there`` makes the result, ``back`` takes the gradient to the source."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        run: Callable[[], Tensor | None],
        there: WithAdjoint,
        back: WithAdjoint,
    ) -> Tensor:
        ctx.there, ctx.back = there, back
        result = run()
        return tensor.new_zeros(()) if result is None else base_of(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        there, back = ctx.there, ctx.back
        # An embedding lookup in the result gives it a sparse gradient.
        grad = grads[0] if grads[0].layout is torch.strided else grads[0].to_dense()
        given = grad if back.is_in_src else None
        back.check(given, None)
        if torch.is_grad_enabled():
            if back.spans_groups:
                raise LayoutError(
                    f"{there.what}: a gradient of a gradient cannot flow between groups of "
                    "different ranks, where some have no tensor to start from; call redistribute "
                    "on the gradients."
                )
            run = back.running(given)
            grad = Redistribute.apply(grad, run, back, there)  # type: ignore[no-untyped-call]
        else:
            grad = back.running(given)()
        return (grad if back.is_in_dst else None), None, None, None


def base_of(result: Tensor) -> Tensor:
    """A tensor on the same memory that is not a view, so that it may be changed in place."""
    if not result._is_view():
        return result
    base = torch.empty(0, dtype=result.dtype, device=result.device)
    base.set_(result.untyped_storage(), result.storage_offset(), result.shape, result.stride())
    return base
