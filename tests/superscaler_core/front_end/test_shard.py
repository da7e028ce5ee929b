"""``shard``: returns its tensor, and marks the tensor if a capture is in progress."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import superscaler_core as ss


class Marked(nn.Module):
    """Two linear maps, with or without marks."""

    def __init__(self, mark: Any = ss.shard) -> None:
        super().__init__()
        self.up, self.down, self.mark = nn.Linear(4, 8), nn.Linear(8, 3), mark

    def forward(self, x: Tensor) -> Tensor:
        self.mark(self.down.weight, "d1@y, d0@-")
        hidden = self.mark(F.gelu(self.up(self.mark(x, "d0@x"))), "d1@y")
        return self.down(hidden).sum()


def unmarked(tensor: Tensor, spec: str) -> Tensor:
    return tensor


def test_shard_marks_are_recorded_without_adding_ops() -> None:
    inputs = (torch.ones(2, 4),)
    marked, plain = ss.capture(Marked(), inputs), ss.capture(Marked(unmarked), inputs)
    assert str(marked) == str(plain)
    found = {name: str(spec) for name, spec in marked.marks.items()}
    assert found == {"x": "d0@x", "gelu": "d1@y", "down.weight": "d0@-, d1@y"}
    assert plain.marks == {}


def test_shard_outside_of_capture_returns_the_tensor_itself() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    assert ss.shard(x, "d0@x") is x
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert ss.shard(fake, "d1@y") is fake
    assert Marked().to("meta")(x.detach().to("meta")).is_meta


def test_torch_export_ignores_shard_marks() -> None:
    inputs = (torch.ones(2, 4),)
    found, wanted = (
        torch.export.export(model, inputs).graph_module.code
        for model in (Marked(), Marked(unmarked))
    )
    assert found == wanted


class Twice(Marked):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(ss.shard(x, "d0@y"))


def test_two_marks_on_one_tensor_are_refused() -> None:
    with pytest.raises(ss.CaptureError, match=r"shard of x\[2, 4\]: 'd0@x', and 'd0@y' before"):
        ss.capture(Twice(), (torch.ones(2, 4),))


@pytest.mark.parametrize("spec", ["d0+x", "d2@x"])
def test_invalid_spec_is_rejected_by_the_call_of_shard(spec: str) -> None:
    with pytest.raises(ss.AnnotationError, match="spec"):
        ss.shard(torch.ones(2, 4), spec)
