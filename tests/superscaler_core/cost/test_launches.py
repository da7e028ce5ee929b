"""Launches: counted kernels of ops, and those that registered functions state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.cost import launches_of
from superscaler_core.models import MODELS, build, example_inputs


@ss.register_op("b h -> b h", launches=(1, 2))
def stated(x: Tensor) -> Tensor:
    """Three kernels of torch, which are said to be one."""
    return (x + 1).sin() * 2


@ss.register_op("b h -> b h")
def unstated(x: Tensor) -> Tensor:
    """Three kernels of torch."""
    return (x + 1).sin() * 2


@ss.register_op("b h -> b h")
def on_values(x: Tensor) -> Tensor:
    """Leaves torch, so it cannot run without values."""
    return x * float(x.detach().numpy().sum() >= 0)


class _Model(nn.Module):
    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.line(x)).sum()


@pytest.mark.parametrize(
    ("what", "kind", "launches"),
    [
        (torch.relu, "relu", (1, 1)),
        (lambda x: x.softmax(-1), "softmax", (1, 1)),
        (lambda x: x.t(), "t", (0, 0)),
        (lambda x: F.gelu(x), "gelu", (1, 1)),
        (stated, "stated", (1, 2)),
        (unstated, "unstated", (3, 3)),
        (on_values, "on_values", (1, 1)),
    ],
)
def test_kernels_are_those_of_torch_or_as_stated(
    what: Callable[[Tensor], Tensor], kind: str, launches: tuple[int, int]
) -> None:
    graph = ss.capture(_Model(what), (torch.zeros(2, 4),))
    (op,) = (op for op in graph.ops if op.kind == kind)
    assert launches_of(ss.Part(op)) == launches


def test_counts_do_not_depend_on_the_mode_of_the_first_call() -> None:
    graph = ss.capture(_Model(lambda x: (x * 3).tanh()), (torch.zeros(3, 4),))
    with torch.inference_mode():
        inside = [launches_of(ss.Part(op)) for op in graph.ops]
    assert inside[-2].backward > 0


@pytest.mark.parametrize("launches", [(1,), 3, (-1, 2), (1, 2.0), [1, 2], (True, 1)])
def test_wrong_numbers_of_kernels_are_refused(launches: Any) -> None:
    with pytest.raises(ss.AnnotationError, match="launches="):
        ss.register_op("b h -> b h", launches=launches)


def test_product_has_a_product_for_each_gradient() -> None:
    graph = ss.capture(_Model(torch.relu), (torch.zeros(2, 4),))
    (op,) = (op for op in graph.ops if op.kind == "linear")
    assert launches_of(ss.Part(op)) == (1, 1)  # The input is the batch, which has no gradient.


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_op_that_computes_launches_kernels(name: str) -> None:
    graph = ss.capture(build(name), example_inputs(name, 2))
    for op in graph.ops:
        forward, backward = launches_of(ss.Part(op))
        assert forward or not op.flops, op
        assert not backward or any(t.requires_grad for t in op.outputs), op
