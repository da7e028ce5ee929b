"""``PlanTrainer`` on one rank: models and arguments that need no second one to be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.superscaler_core.integrations.small_runs import trained, trainer


@pytest.mark.parametrize("model", ["frozen", "recomputed"])
def test_models_train_as_by_the_plain_trainer(tmp_path: Path, model: str) -> None:
    plain, planned = (trained(0, tmp_path, plan, {}, model) for plan in (None, "data_parallel"))
    assert planned == [pytest.approx(log, rel=2e-5) for log in plain]


def test_weights_alone_begin_a_new_optimizer_as_by_the_plain_trainer(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    logs = []
    for plan in (None, "data_parallel"):
        folder = tmp_path / str(plan)
        trained(0, folder, plan, saves, stop=3)
        logs.append(trained(0, folder, plan, saves, resume=True))
    assert logs[1] == [pytest.approx(log, rel=2e-5) for log in logs[0]]


def test_an_evaluation_needs_no_training(tmp_path: Path) -> None:
    plain, planned = (
        trainer(tmp_path, plan, train_dataset=None).evaluate() for plan in (None, "zero3")
    )
    assert planned["eval_loss"] == pytest.approx(plain["eval_loss"], rel=2e-5)
    assert planned["eval_accuracy"] == plain["eval_accuracy"]
