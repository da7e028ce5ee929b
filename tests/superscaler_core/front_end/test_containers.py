"""Arguments may be in dataclasses, mappings, namespaces and arrays, in the capture and in steps."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.front_end.containers import closed, opened
from tests.superscaler_core.parallel.threads import on_threads

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Pair = namedtuple("Pair", "x scale")


@dataclass(frozen=True)
class Batch:
    x: Any
    scale: Any = 2.0


# How the model reads the batch, and the batch.
CASES: dict[str, tuple[Callable[[Any], Tensor], Any]] = {
    "dataclass": (lambda b: b.x * b.scale, Batch(X)),
    "UserDict": (lambda b: b["x"] * b["scale"], UserDict(x=X, scale=np.float32(2.0))),
    "namespace": (lambda b: b.x, SimpleNamespace(x=X)),
    "read-only mapping": (lambda b: b["x"], MappingProxyType({"x": X})),
    "ordered": (lambda b: b["x"], OrderedDict(x=X)),
    "named tuple": (lambda b: b.x * b.scale, Pair(X, 3)),
    "array": (torch.as_tensor, X.numpy()),
    "array of the forward": (lambda b: torch.from_numpy(b), X.numpy()),
    "nested": (lambda b: b[0].x["x"] * b[1], [Batch(UserDict(x=X)), 3]),
}


class Model(nn.Module):
    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.read = nn.Linear(6, 6, dtype=torch.float64), read

    def forward(self, batch: Any) -> Tensor:
        return (self.line(self.read(batch)) ** 2).mean()


@pytest.mark.parametrize("name", CASES)
def test_step_of_a_batch_in_a_container_has_the_loss_of_torch(name: str) -> None:
    read, batch = CASES[name]
    model = Model(read)
    expected = model(batch).detach()
    found = on_threads(model, {"batch": batch}, 2, lambda parallel: parallel.step(batch))
    for loss in found.values():
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [name for name in CASES if "array" not in name])
def test_closed_undoes_opened(name: str) -> None:
    value = CASES[name][1]
    assert type(closed(opened(value), value)) is type(value)
    assert opened(closed(opened(value), value)) == opened(value)


@pytest.mark.parametrize("batch, kind", [({1, 2}, "set"), ([object()], "object")])
def test_argument_that_cannot_be_opened_is_refused_by_name(batch: object, kind: str) -> None:
    with pytest.raises(ss.CaptureError, match=rf"argument 'batch' contains a {kind}; a step takes"):
        ss.capture(Model(lambda b: X), kwargs={"batch": batch})
