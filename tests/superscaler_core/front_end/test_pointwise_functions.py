"""Pointwise autograd functions are split like any other pointwise op."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import superscaler_core as ss
from superscaler_core.run.evaluate import evaluate
from tests.superscaler_core import functions
from tests.superscaler_core.parts import check_splits, values_of


class Forward(Function):
    """Applies one function in the forward and another one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x)
        return _FORWARDS.get(kind, torch.tanh)(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * _BACKWARDS.get(ctx.kind, torch.cos)(*ctx.saved_tensors), None


_FORWARDS = {
    "softmax": lambda x: x.softmax(-1),
    "numbered": lambda x: x / x.numel(),
    "of a row": lambda x: x - x[:1],
    "shaped": lambda x: x + torch.ones(x.shape, dtype=x.dtype, device=x.device),
    "turned": lambda x: x.T.contiguous().T * 2,
}
_BACKWARDS = {
    "mean of gradient": lambda x: x.mean(),
    "valued gradient": lambda x: x * 2 if x.sum() > 0 else x,
    "numbered gradient": lambda x: torch.full_like(x, 1 / len(x)),
}


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.line = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.line(x)).square().sum()


POINTWISE = {
    "one": lambda x: Forward.apply(x, "cosine"),
    "reversal": lambda x: functions.Reverse.apply(x, 0.5),
    "straight through, taken out of its class before": functions.Sign.apply,
    "clamped": lambda x: functions.Clamped.apply(x, 0.1),
    "tuple": lambda x: functions.One.apply(x)[0],
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_autograd_functions_can_be_split_exactly(name):
    torch.manual_seed(0)
    model, x = Model(POINTWISE[name]), torch.randn(6, 4).double()
    graph = ss.capture(model, (x,))
    assert not graph.opaque
    parameters = dict(model.named_parameters())
    found, expected = evaluate(graph, (x,), parameters), model(x)
    wanted = list(parameters.values())
    grads = [torch.autograd.grad(loss, wanted) for loss in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    values = values_of(graph, (x,), parameters)
    for op in graph.ops:
        check_splits(op, [values[tensor] for tensor in op.inputs])


@pytest.mark.parametrize("kind", [*_FORWARDS, *_BACKWARDS])
def test_non_pointwise_autograd_functions_are_not_split(kind):
    model = Model(lambda x: Forward.apply(x, kind))
    with pytest.warns(ss.OpaqueWarning, match="Forward"):
        graph = ss.capture(model, (torch.randn(6, 4).double(),))
    (op,) = (op for op in graph.ops if op.kind == "Forward")
    assert not any(map(op.is_splittable, op.sizes))
