"""Trainers and workers die at random moments: engines serve the old weights, and go on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.vllm.engine import Remote, needs_vllm, serving
from tests.vllm.models import folder
from tests.vllm.trainers import Trainer

pytestmark = needs_vllm

TRAINER_KILLS = int(os.environ.get("RVDCOMM_KILLS", "8"))
WORKER_KILLS = max(TRAINER_KILLS // 8, 1)
TP = 2


def _served(remote: Remote) -> tuple[str, object]:
    return remote.version(), remote.tokens()


def test_an_engine_outlives_its_trainers(tmp_path: Path) -> None:
    """A rank of a trainer is killed in an update; the next trainer's update works."""
    draw = random.Random(int(os.environ.get("RVDCOMM_SEED", "0")))
    ends = {"old": 0, "new": 0}
    with serving(folder("llama", 0, tmp_path), TP, tmp_path) as remote:
        for number in range(TRAINER_KILLS):
            source = draw.choice(["plain", "fsdp2"])
            seeds = [2 * number + 1, 2 * number + 2]
            trainer = Trainer(source, "llama", remote, TP, tmp_path / str(number), seeds)
            try:
                assert [error for _, error in trainer.send()] == [""] * len(trainer.processes)
                before = _served(remote)
                assert before[0] == f"seed-{seeds[0]}"
                trainer.begin()
                time.sleep(draw.random() * 0.2)
                victim = draw.choice(trainer.processes)
                os.kill(victim.pid, signal.SIGKILL)
                killed = time.monotonic()
                answers = trainer.answers()
                # A rank that was waiting for the one that died hears of it at once.
                assert all(error == "" or time.monotonic() - killed < 3 for _, error in answers)
                version, tokens = _served(remote)
                is_new = version == f"seed-{seeds[1]}"
                ends["new" if is_new else "old"] += 1
                assert is_new or (version, tokens) == before
            finally:
                trainer.close()
        last = Trainer("plain", "llama", remote, TP, tmp_path / "last", [1000])
        try:
            assert [error for _, error in last.send()] == [""]
            assert remote.faults(str(folder("llama", 1000, tmp_path))) == []
        finally:
            last.close()
    print(f"{TRAINER_KILLS} kills: {ends}")
    assert ends["old"] > 0


@pytest.mark.parametrize("number", range(WORKER_KILLS))
def test_a_trainer_hears_of_a_dead_worker(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    with serving(folder("llama", 0, tmp_path), TP, tmp_path) as remote:
        trainer = Trainer("fsdp2", "llama", remote, TP, tmp_path / "trainer", [1, 2])
        try:
            assert [error for _, error in trainer.send()] == ["", ""]
            victim = draw.choice([worker["pid"] for worker in remote.workers()])
            os.kill(victim, signal.SIGKILL)
            answers = trainer.send()
            assert all("Error" in error and secs < 3 for secs, error in answers), answers
        finally:
            trainer.close()
