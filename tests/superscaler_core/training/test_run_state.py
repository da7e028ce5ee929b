"""The state of a run is read as it was saved; a text of another form is refused and passed over."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from rvdcomm.checkpoint import commit_shards, save_shards
from superscaler_core.training.checkpoint import on_rank
from superscaler_core.training.resume import _state
from superscaler_core.training.run_state import RunState
from superscaler_core.training.training_state import TEXT
from tests.superscaler_core.training.test_training_state import OPTIMIZERS, net


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a run with an optimizer and a scheduler."""
    model, folder = net(), tmp_path_factory.mktemp("saved") / "step"
    optimizer = OPTIMIZERS["adam"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ss.save_run(folder, model, optimizer=optimizer, scheduler=scheduler, step=3, extra=(1, "a"))
    state = _state(folder)
    assert state is not None
    return state.text


def test_state_is_read_back(text: str) -> None:
    state = RunState.of_text(text)
    assert state.text == text
    assert (state.step, state.extra, state.kinds) == (3, (1, "a"), ["StepLR"])


def test_state_of_an_earlier_version_is_read(text: str) -> None:
    pairs = [pair for pair in json.loads(text)["dict"] if pair[0] not in ("id", "kinds")]
    state = RunState.of_text(json.dumps({"dict": pairs}))
    assert (state.id, state.kinds, state.step) == ("", (), 3)


Change = Callable[[str], str]


def with_value(name: str, value: Any, text: str) -> str:
    """The text with another value for a name; without the name if the value is ``...``."""
    pairs = [pair for pair in json.loads(text)["dict"] if pair[0] != name]
    return json.dumps({"dict": pairs if value is ... else [*pairs, [name, value]]})


NO_DTYPE = {"dict": [["exp_avg", "load"]]}
VALUES = {
    "step": ["3", 1.5, True, [3], {"tuple": [3]}],
    "groups": [None, 3, [3], [["Adam", {"dict": []}]], [["Adam", 3, {"dict": []}]],
               [["Adam", {"dict": []}, {"dict": [["w", 3]]}]],
               [["Adam", {"dict": []}, {"dict": [["w", [{"dict": []}, NO_DTYPE]]]}]]],
    "schedulers": [None, 3, [3], {"dict": []}],
    "random": [None, [], [3], [{"dict": []}], [{"dict": [["python", 3]]}]],
    "random_of_rank": [None, [], [5], [-1], ["0"], 0],
    "dropout": [3, [1], ["a", "b"]],
    "other": [1],
}  # fmt: skip
CHANGES: dict[str, Change] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "list": lambda text: "[]",
    "number": lambda text: "3",
    "deep": lambda text: "[" * 100_000,
    "plain": lambda text: '{"step": 3}',
    "unknown": lambda text: '{"set": []}',
    "two keys": lambda text: '{"dict": [], "tuple": []}',
    "dtype": lambda text: text.replace('"uint8"', '"load"'),
    "base64": lambda text: text.replace('"tensor": ["uint8", [', '"tensor": ["uint8", [9'),
    "unhashable": lambda text: '{"dict": [[[1], 2]]}',
    **{f"no {name}": partial(with_value, name, ...)
       for name in ("step", "groups", "schedulers", "random", "random_of_rank", "dropout")},
    **{f"{name} {number}": partial(with_value, name, value)
       for name, values in VALUES.items() for number, value in enumerate(values)},
}  # fmt: skip


def is_read(text: str) -> bool:
    """Whether a text is the state of a run."""
    try:
        RunState.of_text(text)
    except rv.CheckpointError as error:
        if "the state of its run is damaged" in str(error):
            return False
        raise
    return True


def test_text_of_another_form_raises_checkpoint_error(text: str) -> None:
    assert [name for name, change in CHANGES.items() if is_read(change(text))] == []


def write(folder: Path, text: str) -> None:
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    save_shards(folder, {TEXT: data}, {TEXT: on_rank(0, data.shape)}, 0)
    commit_shards(folder, [0])


def test_latest_passes_over_folders_of_another_form_with_a_warning(
    text: str, tmp_path: Path
) -> None:
    write(tmp_path / "step-3", text)
    for name, change in CHANGES.items():
        write(tmp_path / name, change(text))
    (tmp_path / "interrupted").mkdir()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert ss.latest(tmp_path) == tmp_path / "step-3"
    assert len(told) == len(CHANGES)
    assert all("latest passes over " in str(one.message) for one in told)
