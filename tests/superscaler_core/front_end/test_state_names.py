"""State dicts of trainers have the names of ``model.state_dict()``, whatever hooks make of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import superscaler_core as ss
from superscaler_core.front_end.state_names import StateNames
from tests.superscaler_core.as_torch import compiled, in_program, in_torch
from tests.superscaler_core.parallel.threads import on_threads

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Counted(nn.Linear):
    """A module with a state of its own besides tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": 3, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["calls"] == 3


class Opaque(nn.Linear):
    def get_extra_state(self) -> Any:
        return object()


class Model(nn.Module):
    def __init__(self, change: Callable[[Model], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("kept", torch.ones(6))
        change(self)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return ((self.other(self.line(x)) * self.kept) ** 2).mean()


def renaming(old: str, new: str) -> Callable[[Model], object]:
    def hook(model: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state[new] = state.pop(old)

    return lambda model: model._register_state_dict_hook(hook)


def tied(model: Model) -> None:
    model.other.weight = model.line.weight
    renaming("other.weight", "head")(model)


CHANGES: dict[str, Callable[[Model], object]] = {
    "nothing": lambda model: None,
    "checkpoint wrapper": lambda m: setattr(m, "line", checkpoint_wrapper(m.line)),
    "hook": renaming("other.weight", "head"),
    "hook of a buffer": renaming("kept", "mask"),
    "hook of a tied weight": tied,
    "extra state": lambda m: setattr(m, "other", Counted(6, 6)),
}


@pytest.mark.parametrize("name, plan", [*zip(CHANGES, cycle(["zero3", "data_parallel"]))])
def test_state_dict_of_a_trainer_loads_into_the_model_and_back(
    name: str, plan: str, tmp_path: Path
) -> None:
    model = Model(CHANGES[name])
    alone = deepcopy(model)
    expected, names = in_torch(alone, [X, X])

    def work(parallel: ss.Parallel) -> tuple[list[float], dict[str, Tensor]]:
        parallel.load_state_dict(model.state_dict())
        found, _ = in_program(parallel, [X, X])
        parallel.save(tmp_path)
        parallel.load(tmp_path)
        return found, parallel.state_dict()

    for loss, state in on_threads(model, {"x": X}, 2, work, plan=plan).values():
        assert loss == pytest.approx(expected, rel=1e-9)
        assert state.keys() == names.keys()
        unexpected = model.load_state_dict(state, strict=False).unexpected_keys
        assert unexpected in ([], ["head"], ["mask"])


def test_extra_state_that_is_no_plain_value_is_left_out_with_a_comment() -> None:
    model = Model(lambda m: setattr(m, "other", Opaque(6, 6)))
    text = compiled(ss.capture(model, (X,)), "data_parallel", 1).file(0)
    assert "# other._extra_state is of type object, which cannot be saved" in text


def test_tensor_that_the_state_dict_lacks_keeps_its_path() -> None:
    model = Model(lambda m: m._register_state_dict_hook(lambda _, state, *__: state.clear()))
    assert {*StateNames.of(model).parameters} == {name for name, _ in model.named_parameters()}
