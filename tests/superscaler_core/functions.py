"""autograd Functions for tests, in an importable module."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Reverse(Function):
    """Gradient reversal: the identity, with a negated and scaled gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Sign(Function):
    """A straight-through estimator of the sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Clamped(Function):
    """The identity with a clamped gradient; clamping a sum differs from summing clamped parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.bound, ctx.bound), None


class Halves(Function):
    """A Function with two inputs and two results; the second result has no gradient."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        made = x * weight
        return made[:, : x.shape[1] // 2].clone(), made.argmax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        whole = torch.cat([grad, torch.zeros_like(grad)], 1)
        return 2 * whole * weight, 3 * (whole * x).sum(0)


class One(Function):
    """A Function that returns a tuple with one result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor]:
        return (x * 2,)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 5 * grad


class Noisy(Function):
    """A Function that draws random numbers; a compiled program would draw other numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Writes(Function):
    """A Function that modifies its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Calls(Function):
    """A Function that takes a Python function as an argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        result: Tensor = function(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.library.custom_op("superscaler_tests::tripled", mutates_args=())
def tripled(x: Tensor, others: Sequence[Tensor], scale: float = 1.0) -> Tensor:
    """A custom op that takes a list of tensors."""
    return 3 * scale * x + sum(others)


@tripled.register_fake
def _(x: Tensor, others: Sequence[Tensor], scale: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def _of_tripled(ctx: Any, grad: Tensor) -> Any:
    return 3 * ctx.scale * grad, [grad] * ctx.num, None


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.num, ctx.scale = len(inputs[1]), inputs[2]


tripled.register_autograd(_of_tripled, setup_context=_keep)
