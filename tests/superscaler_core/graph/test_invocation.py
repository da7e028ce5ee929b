"""Invocations: records of calls, which are printed as text."""

import pytest
import torch
from torch import nn

import superscaler_core as ss
from superscaler_core.graph.invocation import Invocation
from superscaler_core.plans import PLANS

PRODUCTS = {
    "linear": (nn.Linear(6, 4), (4, 6), "F.linear({x0}, {x1})"),
    "conv2d": (nn.Conv2d(2, 4, 3, padding=1, groups=2), (4, 2, 5, 5),
               "ops.conv({x0}, {x1}, [{pad0[2]}, {pad0[3]}], stride=[1, 1], dilation=[1, 1], "
               "groups={size[g]})"),
}  # fmt: skip


class Mean(nn.Module):
    def __init__(self, layer, with_grad=True):
        super().__init__()
        self.layer, self.last, self.with_grad = layer, nn.Linear(1, 1), with_grad

    def forward(self, x):
        with torch.set_grad_enabled(self.with_grad):
            y = self.layer(x).mean().reshape(1)
        return self.last(y).sum()


def files_of(model, shape):
    plan = ss.Plan(ss.capture(model, (torch.randn(shape),)), devices=[0])
    PLANS["data_parallel"](plan)
    return plan.graph, ss.compile(plan).files[0]


def test_adding_a_keyword_appends_it_to_the_call():
    call = Invocation("ops.conv", ("{x0}", "{x1}"), (("stride", "[1, 1]"),))
    assert str(call.adding("bias", "b")) == str(call)[:-1] + ", bias=b)"
    assert call.adding("bias", "b").args == call.args


@pytest.mark.parametrize("kind", PRODUCTS)
def test_linear_and_conv_calls_take_the_bias_as_an_argument(kind):
    layer, shape, code = PRODUCTS[kind]
    graph, text = files_of(Mean(layer), shape)
    op = next(op for op in graph.ops if op.kind == kind)
    assert op.code == code
    call = code.partition("(")[0]
    line = next(line for line in text.splitlines() if f" = {call}(" in line)
    assert line.endswith(", bias=layer_bias)")


def test_linear_without_gradients_adds_its_bias_separately():
    _, text = files_of(Mean(nn.Linear(6, 4), with_grad=False), (4, 6))
    assert "(F.linear(x, layer_weight)).detach()" in text
