"""Callbacks: called after each step and evaluation, and the writers among them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.parallel import writers
from tests.superscaler_core.parallel.test_stats import named, of_ranks


class Notes(ss.Callback):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, float]] = []

    def on_step_end(self, model: Any, stats: ss.StepStats, loss: Tensor) -> None:
        self.calls.append((stats.kind, stats.number, loss.item()))

    def on_evaluate_end(self, model: Any, stats: ss.StepStats, loss: Tensor) -> None:
        self.calls.append((stats.kind, stats.number, loss.item()))


class Board:
    """What a ``SummaryWriter`` and a run of Weights & Biases are asked for."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[name, step] = value

    def log(self, values: dict[str, float], step: int) -> None:
        self.values |= {(name, step): value for name, value in values.items()}


def run(*callbacks: ss.Callback, num_ranks: int = 1) -> list[Any]:
    """Three steps and an evaluation; the losses of the ranks."""

    def work(parallel: ss.Parallel) -> list[float]:
        for callback in callbacks:
            parallel.add_callback(callback)
        losses = [parallel.step(**named(4)).item() for _ in range(3)]
        return [*losses, parallel.evaluate(**named(4)).item()]  # type: ignore[union-attr]

    return of_ranks("data_parallel", work, num_ranks)


def test_callbacks_are_called_after_each_step_and_evaluation() -> None:
    first, second = Notes(), Notes()
    (losses,) = run(first, second)
    kinds = [("step", 1), ("step", 2), ("step", 3), ("evaluate", 1)]
    assert first.calls == [(*kind, loss) for kind, loss in zip(kinds, losses, strict=True)]
    assert second.calls == first.calls


def test_a_removed_callback_is_not_called() -> None:
    notes = Notes()

    def work(parallel: ss.Parallel) -> None:
        parallel.add_callback(notes)
        parallel.step(**named(4))
        parallel.remove_callback(notes)
        parallel.step(**named(4))

    of_ranks("data_parallel", work, num_ranks=1)
    assert len(notes.calls) == 1


def test_what_a_callback_calls_is_a_call_of_its_own() -> None:
    class Evaluates(ss.Callback):
        def on_step_end(self, model: Any, stats: ss.StepStats, loss: Tensor) -> None:
            model.evaluate(**named(4))

    def work(parallel: ss.Parallel) -> list[str]:
        parallel.add_callback(Evaluates())
        parallel.step(**named(4))
        return [call.name for call in parallel.trainer.calls.users.calls]

    assert of_ranks("data_parallel", work) == [["step", "evaluate"]] * 2


def test_what_is_no_callback_is_refused() -> None:
    def work(parallel: ss.Parallel) -> None:
        with pytest.raises(PlanError, match=r"derives from ss\.Callback, not <"):
            parallel.add_callback(lambda: None)  # type: ignore[arg-type]

    of_ranks("data_parallel", work, num_ranks=1)


@pytest.mark.parametrize("writer", [ss.TensorBoardWriter, ss.WandbWriter])
def test_writers_log_on_the_first_rank_each_so_many_steps(writer: Any) -> None:
    board = Board()
    losses, _ = run(writer(board, every=2), num_ranks=2)
    assert {step for name, step in board.values if name.startswith("step/")} == {2}
    # The evaluation is drawn over the three steps before it.
    assert board.values["evaluate/loss", 3] == losses[3]
    assert board.values["step/loss", 2] == losses[1]
    assert board.values["step/tokens_per_sec", 2] > 0


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_writers_refuse_odd_intervals(every: Any) -> None:
    with pytest.raises(PlanError, match="every is a number from 1"):
        ss.TensorBoardWriter(Board(), every=every)


@pytest.mark.parametrize(
    "make, package",
    [(lambda: ss.TensorBoardWriter("runs"), "tensorboard"), (lambda: ss.WandbWriter(), "wandb")],
)
def test_a_missing_package_is_named_with_its_install(
    make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'rvdcomm\[{package}\]'"):
        make()


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_its_writer_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = ss.TensorBoardWriter(tmp_path)
    (losses,) = run(writer)
    writer.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    steps = [(event.step, event.value) for event in found.Scalars("step/loss")]
    assert [step for step, _ in steps] == [1, 2, 3]
    assert [value for _, value in steps] == pytest.approx(losses[:3], rel=1e-6)  # float32
