"""``PlanTrainer`` on two ranks does what the plain ``Trainer`` does on one device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.dist.world import Worlds
from tests.superscaler_core.integrations.small_runs import Logs, predicted, trained

pytestmark = pytest.mark.dist

CLOSE = 2e-5
"""Sums of float32 in another order."""

OTHERS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "best": {"load_best_model_at_end": True, "save_strategy": "epoch"},
    "adafactor": {
        "optim": "adafactor",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
    },
}
"""Arguments on which a training depends on one device too."""

TOLERANCE = {"bf16": 2e-2}
"""Of what is computed in bfloat16, in another order."""


class Plain:
    """Trainings by the plain trainer, each made once: their logs, and the weights they save."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], tuple[Logs, Path]] = {}

    def __call__(self, model: str = "llama", case: str = "") -> tuple[Logs, Path]:
        if (model, case) not in self._made:
            folder = self._folder(f"{model}-{case}")
            logs = trained(0, folder, None, OTHERS.get(case, {}), model)
            self._made[model, case] = logs, folder / "model"
        return self._made[model, case]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp)


def close(logs: Logs, rel: float = CLOSE) -> list[Any]:
    return [pytest.approx(log, rel=rel) for log in logs]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "plan", ["data_parallel", "zero3", "hybrid:tp=2,microbatches=2", "one_f_one_b:microbatches=2"]
)
def test_losses_metrics_and_saved_weights_are_those_of_one_device(
    worlds: Worlds, tmp_path: Path, plain: Plain, plan: str
) -> None:
    first, second = worlds(2).run(trained, tmp_path, plan, {})
    logs, saved = plain()
    assert first == second == close(logs)
    torch.testing.assert_close(weights(tmp_path / "model"), weights(saved), rtol=1e-3, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(
        path.name for path in saved.iterdir()
    )


@pytest.mark.parametrize("case", OTHERS)
def test_arguments_mean_what_they_mean_on_one_device(
    worlds: Worlds, tmp_path: Path, plain: Plain, case: str
) -> None:
    first, second = worlds(2).run(trained, tmp_path, "zero3", OTHERS[case])
    logs, saved = plain(case=case)
    assert first == second == close(logs, TOLERANCE.get(case, CLOSE))
    off = TOLERANCE.get(case, 1e-5)
    torch.testing.assert_close(weights(tmp_path / "model"), weights(saved), rtol=1e-3, atol=off)


def test_a_model_whose_loss_is_a_mean_accumulates_the_mean_of_means(
    worlds: Worlds, tmp_path: Path, plain: Plain
) -> None:
    first, _ = worlds(2).run(trained, tmp_path, "data_parallel", {}, "words")
    logs, saved = plain("words")
    assert first == close(logs)
    torch.testing.assert_close(weights(tmp_path / "model"), weights(saved), rtol=1e-3, atol=1e-5)


SAVES = {"save_strategy": "steps", "save_steps": 3}
"""The third of four steps is in the middle of the second epoch."""


@pytest.fixture(scope="module")
def stopped(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training under ZeRO on two ranks, which stopped after three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    worlds(2).run(trained, folder, "zero3", SAVES, "llama", 3)
    return folder


@pytest.fixture
def resumed(stopped: Path, tmp_path: Path) -> Path:
    """A copy of that folder, in which a training goes on."""
    return Path(shutil.copytree(stopped, tmp_path / "resumed"))


def test_a_checkpoint_continues_under_another_plan(
    worlds: Worlds, resumed: Path, plain: Plain
) -> None:
    plan = "hybrid:tp=2,microbatches=2"
    first, second = worlds(2).run(trained, resumed, plan, SAVES, "llama", 0, True)
    # The last entry is the mean loss since the start, for which the library takes the resumption.
    assert first[:-1] == second[:-1] == close(plain()[0][:-1])


def test_a_checkpoint_of_two_ranks_continues_on_one(resumed: Path, plain: Plain) -> None:
    logs = trained(0, resumed, "data_parallel", SAVES, "llama", 0, True)
    assert logs[:-1] == close(plain()[0][:-1])


def test_only_the_first_rank_writes_what_is_whole(stopped: Path) -> None:
    names = {path.name for path in (stopped / "checkpoint-3").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "rng_state.pth", "plan"} <= names
    assert not [name for name in names if name.startswith(("rng_state_", "optimizer"))]


def test_predictions_are_whole_and_in_order_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    found, other = worlds(2).run(predicted, tmp_path, "data_parallel")
    logits, labels, loss = predicted(0, tmp_path, None)
    assert np.allclose(found[0], logits, atol=1e-5)
    assert (found[0] == other[0]).all()
    assert (found[1] == labels).all()
    assert found[2] == other[2] == pytest.approx(loss, rel=CLOSE)
