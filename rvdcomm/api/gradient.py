"""Gradient: a call as a node of the autograd graph, whose backward is the call of the adjoint.

All ranks of the two layouts have such a node, also those that have no tensor on one side, so that
the backward pass brings all of them together again (docs/gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rvdcomm.errors import LayoutError

if TYPE_CHECKING:
    from rvdcomm.api.redistributor import Redistributor


def with_grad(tensor: Tensor | None, run: Callable[[], Tensor | None], call: Redistributor) -> Any:
    """What ``run`` makes of ``tensor`` by ``call``, as a node of the autograd graph.

    A rank without a tensor that requires grad hangs its node on a leaf that nobody sees. One
    without a result gets a scalar of 0, whose ``backward`` takes part in the adjoint.
    """
    if tensor is None:
        tensor = torch.zeros((), dtype=call.dtype)
    leaf = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
    return Redistribute.apply(leaf, run, call, call.adjoint)  # type: ignore[no-untyped-call]


class Redistribute(torch.autograd.Function):
    """``there`` is the call that makes the result, ``back`` its adjoint; each is the other's."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        run: Callable[[], Tensor | None],
        there: Redistributor,
        back: Redistributor,
    ) -> Tensor:
        ctx.there, ctx.back = there, back
        result = run()
        return tensor.new_zeros(()) if result is None else base_of(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        there, back = ctx.there, ctx.back
        # A lookup in the result may give it a gradient of few rows, without strides.
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
    """The same memory as a tensor that is no view, so that it may be changed in place."""
    if not result._is_view():
        return result
    base = torch.empty(0, dtype=result.dtype, device=result.device)
    base.set_(result.untyped_storage(), result.storage_offset(), result.shape, result.stride())
    return base
