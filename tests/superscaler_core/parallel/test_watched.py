"""``Watched``: a step computes with the model's present values, as on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import superscaler_core as ss
from superscaler_core.parallel.watched import Originals, Reads, Watched
from tests.superscaler_core.parallel.small_nets import Net, batch, net


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def set_folded(model: Any, value: float) -> None:
    model.folded.fill_(value)


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "a number": (lambda m: setattr(m, "beta", 0.5), lambda m: setattr(m, "beta", 1.0)),
    "a number of the class": (lambda m: setattr(m, "scale", 3.0), lambda m: delattr(m, "scale")),
    "an attribute of a submodule": (lambda m: setattr(m.drop, "p", 1.0),
     lambda m: setattr(m.drop, "p", 0.0)),
    "a submodule": (lambda m: setattr(m, "act", Double()), lambda m: setattr(m, "act", nn.Tanh())),
    "a config": (lambda m: setattr(m.config, "gain", 5.0),
     lambda m: setattr(m.config, "gain", 2.0)),
    "a list": (lambda m: m.factors.__setitem__(1, 7.0), lambda m: m.factors.__setitem__(1, 3.0)),
    "a tensor": (lambda m: m.mask[2:].zero_(), lambda m: m.mask.fill_(1)),
    "a tensor in its place": (lambda m: setattr(m, "mask", 2 * m.mask),
     lambda m: setattr(m, "mask", m.mask / 2)),
    "a buffer that is folded": (lambda m: set_folded(m, 4.0), lambda m: set_folded(m, 1.0)),
    "a mode": (lambda m: m.drop.train(), lambda m: m.drop.eval()),
    "a hook": (lambda m: setattr(m, "h", m.act.register_forward_hook(lambda *a: 2 * a[2])),
     lambda m: m.h.remove()),
}  # fmt: skip
"""Changes of what the capture reads, each with the change back."""


def watched(model: nn.Module) -> Watched:
    with Reads(model) as reads:
        model(batch())
    return reads.watched(())


@pytest.mark.parametrize("name", CHANGES)
def test_watched_values_hold_until_they_change(name: str) -> None:
    model = net()
    model.drop.eval()
    found, change = watched(model), CHANGES[name][0]
    assert found.holds()
    assert found.difference() == ""
    change(model)
    assert not found.holds()
    assert found.difference() != ""


@pytest.mark.parametrize("name", ["a number", "a config", "a list", "an attribute of a submodule"])
def test_values_that_are_set_back_hold_again(name: str) -> None:
    model = net()
    found = watched(model)
    for change in CHANGES[name]:
        change(model)
    assert found.holds()
    assert found.difference() == ""


@pytest.mark.parametrize("name", ["unread", "seen", "new"])
def test_values_that_the_forward_does_not_read_are_not_watched(name: str) -> None:
    model = net()
    found = watched(model)
    setattr(model, name, 3.0)
    assert found.holds()


def test_step_computes_with_present_values_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net(), batch()
    model.drop.p = 0.0
    parallel = ss.parallelize(model, kwargs={"x": x})
    losses = [parallel.step(x=x).item()]
    wanted = [model(x).item()]
    with caplog.at_level(logging.INFO, "superscaler_core"):
        for name in ("a number", "a submodule", "a buffer that is folded", "a config"):
            CHANGES[name][0](model)
            losses += [parallel.step(x=x).item(), parallel.evaluate(x=x).item()]
            wanted += [model(x).item()] * 2
    assert losses == pytest.approx(wanted, rel=1e-12)
    said = [r.message for r in caplog.records if "captures the model again" in r.message]
    assert said[0].endswith("because beta changed from 1.0 to 0.5")


def test_values_that_alternate_need_two_programs() -> None:
    model, x = net(), batch()
    parallel = ss.parallelize(model, kwargs={"x": x})
    losses = []
    for step in range(4):
        CHANGES["a number"][step % 2](model)
        losses.append(parallel.step(x=x).item())
    assert losses[0] == losses[2] != losses[1] == losses[3]
    assert len(parallel._programs.kept) == 2


def test_folded_buffer_is_in_the_state_dict_with_its_present_value() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 * self.kept).sum()

    model, x = Scaled().double(), batch()
    parallel = ss.parallelize(model, kwargs={"x": x})
    found = []
    for value in (1.0, 3.0):
        model.kept.fill_(value)
        assert parallel.step(x=x).item() == pytest.approx(model(x).item(), rel=1e-12)
        found.append(parallel.state_dict()["kept"])
    torch.testing.assert_close(found, [torch.ones(6).double(), torch.full((6,), 3.0).double()])


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda m: m.load_state_dict(net(1).state_dict()), "layers.0.weight"),
        (lambda m: nn.init.ones_(m.layers[2].bias), "layers.2"),
        (lambda m: setattr(m.layers[1], "weight", nn.Parameter(torch.ones(6, 6))), "layers.1"),
        (lambda m: m.shift.zero_(), "shift"),
        (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "extra"),
    ],
)
def test_changes_of_the_captured_models_own_state_are_refused_by_name(
    change: Callable[[Any], object], name: str
) -> None:
    model, x = net(), batch()
    parallel = ss.parallelize(model, kwargs={"x": x})
    change(model)
    for call in (parallel.step, parallel.evaluate):
        with pytest.raises(ss.PlanError, match=rf"'{name}.*parallel\.load_state_dict"):
            call(x=x)


def test_loading_by_the_parallel_model_ends_the_refusal() -> None:
    model, x = net(), batch()
    parallel = ss.parallelize(model, kwargs={"x": x})
    model.load_state_dict(net(1).state_dict())
    parallel.load_state_dict(model.state_dict())
    assert parallel.step(x=x).item() == pytest.approx(net(1)(x).item(), rel=1e-12)


def test_originals_compare_values_by_version_and_place() -> None:
    model = net()
    found = Originals(model, ())
    assert found.changed() == ""
    model.layers[3].bias.data = torch.zeros(6)
    assert found.changed() == "layers.3.bias"
    found.accept()
    assert found.changed() == ""
