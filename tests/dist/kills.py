"""Kill and resume training runs: ``python -m tests.dist.kills --times 50`` runs 50 trials.

A trial trains on several processes, kills all of them with SIGKILL at a random moment, and resumes
under another plan, usually on another number of processes. Its losses must equal the losses of
an uninterrupted run. A kill can interrupt a step or a save, also before the first checkpoint is
complete.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import superscaler_core as ss
from tests.dist.world import ProcessWorld
from tests.superscaler_core.resumed import CASES, Resumable, same_losses

NUM_STEPS = 6
DROPOUT_SEED = 5
PROGRESS = "progress"
"""A file with the number of steps that the first rank has taken."""


def programs(folder: Path, names: Iterable[str] = CASES) -> None:
    """Compile these cases and save their programs."""
    for name in names:
        CASES[name].compiled().save(folder / name)


def _drawn(step: int) -> int:
    """A seed drawn from all random generators whose states a checkpoint contains."""
    return int(torch.randint(999, ())) + random.randrange(999) + int(np.random.randint(999))


def train(rank: int, name: str, program: Path, saves: Path, form: str) -> dict[int, float]:
    """Train one rank to the end, from the latest checkpoint in ``saves`` if there is one."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    run = Resumable(ss.load(program / name, seed=DROPOUT_SEED), CASES[name], _drawn)
    last = ss.latest(saves)
    if last is not None:
        run.load(last)
    while run.step < NUM_STEPS:
        run.train(1)
        if rank == 0:
            (saves / PROGRESS).write_text(str(run.step))
        run.save(saves / f"step-{run.step}", format=form)
    return run.losses


@dataclass(frozen=True)
class Trial:
    """A run that is killed and resumed.

    Attributes:
        before, after: plans before and after the kill, names of ``CASES``.
        step: number of steps of the first rank after which all ranks are killed.
        delay_secs: further seconds until the kill.
        form: format of the checkpoints.
    """

    before: str
    after: str
    step: int
    delay_secs: float
    form: str

    @classmethod
    def drawn(cls, seed: int) -> Trial:
        """A trial that depends only on the seed, except for the exact moment of the kill."""
        draw = random.Random(seed)
        before, after = draw.sample(sorted(CASES), 2)
        step, delay = draw.randrange(NUM_STEPS), draw.random() * 0.1
        return cls(before, after, step, delay, draw.choice(["safetensors", "dcp"]))

    def run(self, program: Path, saves: Path, expected: dict[int, float]) -> str:
        """Run, kill and resume; returns whether the kill interrupted "a save" or "a step".

        Raises:
            AssertionError: losses differ from those expected.
        """
        saves.mkdir()
        world = ProcessWorld(CASES[self.before].num_devices)
        world.run(abs)
        killer = threading.Thread(target=self._kill, args=(world, saves), daemon=True)
        killer.start()
        args = (self.before, program, saves, self.form)
        world.run(train, *args, dying=range(world.num_ranks))
        killer.join()
        last = ss.latest(saves)
        num_folders = len([path for path in saves.iterdir() if path.is_dir()])
        found = on_processes(self.after, program, saves, self.form)
        first = 0 if last is None else int(last.name.removeprefix("step-"))
        assert all(sorted(losses) == list(range(first, NUM_STEPS)) for losses in found)
        assert first == NUM_STEPS or all(same_losses(losses, expected) for losses in found)
        return "a save" if num_folders > first else "a step"

    def _kill(self, world: ProcessWorld, saves: Path) -> None:
        progress = saves / PROGRESS
        # The file is empty for a moment while a rank writes it.
        while self.step and not (progress.exists() and int(progress.read_text() or 0) >= self.step):
            time.sleep(0.001)
        time.sleep(self.delay_secs)
        for process in world._processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def on_processes(name: str, program: Path, saves: Path, form: str) -> list[dict[int, float]]:
    """The losses on every rank of a run that is not killed."""
    saves.mkdir(exist_ok=True)
    world = ProcessWorld(CASES[name].num_devices)
    try:
        return world.run(train, name, program, saves, form)
    finally:
        world.stop()


def main() -> None:
    """Run many trials, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        programs(folder / "programs")
        expected = on_processes("accumulate", folder / "programs", folder / "whole", "safetensors")
        found: Counter[str] = Counter()
        for number in range(options.first, options.first + options.times):
            trial = Trial.drawn(number)
            killed_in = trial.run(folder / "programs", folder / f"trial-{number}", expected[0])
            found[killed_in] += 1
            print(f"{number}: {trial} was killed in {killed_in}; losses are equal", flush=True)
        print(f"{options.times} runs were killed and resumed with equal losses: {dict(found)}")


if __name__ == "__main__":
    from tests.dist import kills

    kills.main()
