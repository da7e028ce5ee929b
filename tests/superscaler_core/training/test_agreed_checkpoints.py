"""A save and a load succeed on all ranks or change nothing on any, with one class of error."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as lr

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.training import checkpoint, training_state
from tests.superscaler_core.training.test_training_state import (
    OPTIMIZERS,
    Scaler,
    net,
    program,
    step_of,
)

Work = Callable[[ss.Trainer, torch.optim.Optimizer], Any]


def on_two(folder: Path, work: Work, plan: str = "zero1") -> list[Any]:
    """The results of two ranks, each with an optimizer."""

    def serve(trainer: ss.Trainer) -> Any:
        return work(trainer, OPTIMIZERS["adam"](trainer.parameters()))

    return list(ss.run_threads(program(folder, plan), serve, range(2), timeout_secs=10).values())


def run_state(trainer: ss.Trainer, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of everything that a load changes on a rank."""
    held = [*trainer.parameters(), *optimizer.state_dict()["state"].values()]
    copied = [{k: v.clone() for k, v in x.items()} if isinstance(x, dict) else x.clone()
              for x in held]  # fmt: skip
    return [*copied, optimizer.state_dict()["param_groups"], torch.get_rng_state()]


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""

    def work(trainer: ss.Trainer, optimizer: torch.optim.Optimizer) -> None:
        for step in (1, 2):
            step_of(trainer, optimizer)
            trainer.save(tmp_path / "saves" / f"step-{step}", optimizer=optimizer, step=step)

    on_two(tmp_path, work)
    return tmp_path / "saves"


def flip_a_bit(folder: Path) -> Path:
    """A copy of a checkpoint with one bit flipped in a tensor that a rank reads whole."""
    copied = Path(shutil.copytree(folder, folder.with_name("flipped")))
    for file in copied.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    return copied


def nowhere(folder: Path) -> Path:
    return folder.with_name("nowhere")


def one_before(folder: Path) -> Path:
    return folder.with_name("step-1")


def without_state(folder: Path) -> Path:
    """A copy of a checkpoint whose state of the run is no JSON."""
    copied = Path(shutil.copytree(folder, folder.with_name("damaged")))
    for file in copied.glob("*.safetensors"):
        file.write_bytes(file.read_bytes().replace(b'{"dict": ', b'{"dict: " '))
    return copied


SEEN = {
    "a flipped bit": (flip_a_bit, "rank 1: .*damaged"),
    "no folder": (nowhere, "rank 1: .*nowhere is no folder with a checkpoint"),
    "another save": (one_before, "ranks 0 and 1 read two different saves"),
    "no state": (without_state, "rank 1: .*damaged"),
}


@pytest.mark.parametrize("what", SEEN)
def test_load_that_fails_on_one_rank_changes_nothing_on_any(
    what: str, saves: Path, tmp_path: Path
) -> None:
    elsewhere, message = SEEN[what][0](saves / "step-2"), SEEN[what][1]

    def work(trainer: ss.Trainer, optimizer: torch.optim.Optimizer) -> int | None:
        step_of(trainer, optimizer)
        before = run_state(trainer, optimizer)
        folder = elsewhere if trainer.rank else saves / "step-2"
        with pytest.raises(rv.CheckpointError, match=f"load .*: {message}"):
            trainer.load(folder, optimizer=optimizer)
        torch.testing.assert_close(run_state(trainer, optimizer), before, rtol=0, atol=0)
        return trainer.load(saves / "step-1", optimizer=optimizer).step

    assert on_two(tmp_path, work) == [1, 1]


def test_copies_of_one_save_are_one_save(saves: Path, tmp_path: Path) -> None:
    shutil.copytree(saves / "step-2", tmp_path / "copy")

    def work(trainer: ss.Trainer, optimizer: torch.optim.Optimizer) -> int | None:
        folder = tmp_path / "copy" if trainer.rank else saves / "step-2"
        return trainer.load(folder, optimizer=optimizer).step

    assert on_two(tmp_path, work) == [2, 2]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr.StepLR(o, 2),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.5**step),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 10),
    "plateau": lambda o: lr.ReduceLROnPlateau(o),
    "sequential": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.StepLR(o, 2)], [3]),
}


@pytest.mark.parametrize(
    "saved, given, is_old",
    [
        ("step", "lambda", False),
        ("lambda", "cosine", False),
        ("cosine", "plateau", False),
        ("plateau", "sequential", False),
        ("sequential", "sequential", False),
        ("step", "sequential", True),
        ("plateau", "step", True),
    ],
)
def test_scheduler_of_another_class_changes_nothing(
    saved: str, given: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    if is_old:  # earlier versions saved no classes
        monkeypatch.setattr(training_state, "classes_of", lambda _: [])
    ss.save_run(tmp_path, model, optimizer=optimizer, scheduler=SCHEDULERS[saved](optimizer))
    monkeypatch.undo()
    other = net()
    with torch.no_grad():
        other.scalar.fill_(7.0)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.5, amsgrad=True)
    scheduler = SCHEDULERS[given](optimizer)
    before = deepcopy((scheduler.state_dict(), optimizer.state_dict()))
    try:
        ss.load_run(tmp_path, other, optimizer=optimizer, scheduler=scheduler)
        assert saved == given or is_old
    except rv.CheckpointError:
        assert saved != given
        assert other.scalar == 7.0
        assert (scheduler.state_dict(), optimizer.state_dict()) == before


# --- saves --------------------------------------------------------------------------------------


class Broken(Scaler):
    def state_dict(self) -> dict[str, float]:
        raise ArithmeticError("no state")


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(20_000):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": Broken(1.0)}, "rank 0: ArithmeticError: no state"),
        ({"scaler": Broken(1.0)}, "rank 0: ArithmeticError: no state"),
        ({"extra": cyclic()}, "rank 0: .*nested in 100 values"),
        ({"extra": deep()}, "rank 0: .*nested in 100 values"),
        ({"extra": 10**5000}, "rank 0: ValueError: Exceeds the limit"),
        ({"extra": {"f": len}}, "rank 0: .*of type builtin_function_or_method"),
        ({"format": "pickle"}, "rank 0: ValueError: format 'pickle' is none of"),
    ],
    ids=["scheduler", "scaler", "cyclic", "deep", "long", "function", "format"],
)
def test_save_of_a_state_that_cannot_be_saved_raises_on_all_ranks(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def work(trainer: ss.Trainer, optimizer: torch.optim.Optimizer) -> None:
        mine = options if trainer.rank == 0 else {}
        with pytest.raises(rv.CheckpointError, match=f"save .*saved: {message}"):
            trainer.save(tmp_path / "saved", optimizer=optimizer, **mine)
        assert not (tmp_path / "saved").exists()
        trainer.save(tmp_path / "saved", optimizer=optimizer)

    on_two(tmp_path, work)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
CALLS = [
    ("save_shards", "safetensors"),
    ("commit_shards", "safetensors"),
    ("save_shards", "dcp"),
    ("commit_shards", "dcp"),
    ("reshard", "dcp"),
    ("sync_folder", "dcp"),
]


@pytest.mark.parametrize(("call", "form"), CALLS)
def test_failed_write_raises_on_all_ranks_and_leaves_nothing(
    call: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(checkpoint, call)

    def fails_on_the_last_writer(*args: Any, **options: Any) -> None:
        real(*args, **options)
        is_save = (tmp_path / "saves") in Path(args[0], "step").parents
        if is_save and (call != "save_shards" or args[3] == 1):
            raise FULL

    def work(trainer: ss.Trainer, optimizer: torch.optim.Optimizer) -> Tensor:
        step_of(trainer, optimizer)
        rank = int(call == "save_shards")
        with pytest.raises(rv.CheckpointError, match=f"save .*: rank {rank}: .*No space left"):
            trainer.save(tmp_path / "saves" / "step", optimizer=optimizer, format=form)
        return trainer.step(torch.ones(8, 6, dtype=torch.float64))

    monkeypatch.setattr(checkpoint, call, fails_on_the_last_writer)
    (tmp_path / "saves").mkdir()
    losses = on_two(tmp_path, work)
    assert losses[0] == losses[1], "the ranks are still in step"
    assert os.listdir(tmp_path / "saves") == []


def test_failed_save_leaves_a_folder_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "notes").write_text("mine")
    with pytest.raises(rv.CheckpointError):
        ss.save_run(tmp_path / "saved", net(), extra=len)
    assert (tmp_path / "saved" / "notes").read_text() == "mine"


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_checkpoint_with_the_longest_name_is_saved(form: str, tmp_path: Path) -> None:
    ss.save_run(tmp_path / ("a" * 255), net(), step=1, format=form)
    assert ss.latest(tmp_path) == tmp_path / ("a" * 255)
