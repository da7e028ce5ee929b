"""A killed run resumes under another plan, with the losses of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.kills import Trial, on_processes, programs

pytestmark = pytest.mark.dist

TRIALS = [
    Trial("accumulate", "hybrid", 2, 0.01, "safetensors"),
    Trial("zero1", "pipeline", 3, 0.05, "dcp"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    programs(folder, {"tensor", *(name for t in TRIALS for name in (t.before, t.after))})
    return folder


@pytest.fixture(scope="module")
def uninterrupted(program: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    saves = tmp_path_factory.mktemp("uninterrupted")
    return on_processes("tensor", program, saves, "safetensors")[0]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.before}-{trial.after}")
def test_killed_run_resumes_under_another_plan_with_the_same_losses(
    trial: Trial, program: Path, uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    trial.run(program, tmp_path / "saves", uninterrupted)
