"""``PlanTrainer`` on two ranks does what the plain ``Trainer`` does on one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.dist.world import Worlds
from tests.superscaler_core.integrations.small_runs import Logs, trained

pytestmark = pytest.mark.dist

PLANS = (
    "data_parallel",
    "zero3",
    "hybrid:tp=2,microbatches=2",
    "one_f_one_b:microbatches=2",
)
CLOSE = 2e-5
"""Sums of float32 in another order."""


@cache
def alone(folder: Path, options: tuple[tuple[str, Any], ...] = ()) -> Logs:
    """The logs of the plain trainer."""
    return trained(0, folder, None, **dict(options))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")

    def logs(**options: Any) -> list[Any]:
        return [pytest.approx(log, rel=CLOSE) for log in alone(folder, tuple(options.items()))]

    return logs


@pytest.mark.parametrize("plan", PLANS)
def test_losses_norms_and_metrics_are_those_of_one_device(
    worlds: Worlds, tmp_path: Path, plain: Any, plan: str
) -> None:
    first, second = worlds(2).run(trained, tmp_path, plan)
    assert first == second == plain()


@pytest.mark.parametrize("plan, resumed", [("zero3", "hybrid:tp=2,microbatches=2"), ("megatron", "zero3")])
def test_a_checkpoint_continues_under_another_plan(
    worlds: Worlds, tmp_path: Path, plain: Any, plan: str, resumed: str
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1}
    worlds(2).run(trained, tmp_path, plan, max_steps=3, **saves)
    first, second = worlds(2).run(trained, tmp_path, resumed, resume=True, **saves)
    assert first[-3:] == second[-3:]


def test_a_checkpoint_of_two_ranks_continues_on_one(
    worlds: Worlds, tmp_path: Path, plain: Any
) -> None:
    pass
