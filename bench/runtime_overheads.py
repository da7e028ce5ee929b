"""Overheads: what the runtime and taking turns on cores cost, from steps of a tiny model.

Its ops take next to nothing, so its steps are nearly all overheads. All functions are collective
over the world.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

import rvdcomm as rv
from bench.training_method import everyone, loaded, shared
from superscaler_core.compiled import Compiled, compile
from superscaler_core.front_end import capture
from superscaler_core.models import build, example_inputs
from superscaler_core.plan import Plan
from superscaler_core.plans import PLANS
from superscaler_core.simulator import DeviceProfile, simulate

TINY_PLANS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("data_parallel", {}),
    ("zero3", {}),
    ("megatron", {}),
    ("one_f_one_b", {"microbatches": 4}),
    ("one_f_one_b", {"microbatches": 12}),
    ("zero_bubble", {"microbatches": 4}),
    ("zero_bubble", {"microbatches": 12}),
)
"""Of a tiny GPT."""

TINY_STEPS, NUM_WARM = 25, 2

FITTED = ("segment_secs", "move_secs", "carry_secs", "split_secs")
"""Fields of a profile that the processor's time tells."""

CORE_SHARES = tuple(0.75 + 0.025 * i for i in range(11))
"""Of the cores, which ranks have that take turns on them: candidates. What is less, others took."""

WAKES_SECS = tuple(50e-6 * i for i in range(31))
"""Until a rank goes on that waited: candidates."""


@dataclass(frozen=True)
class Tiny:
    """A program of the tiny model, and its step on this rank."""

    compiled: Compiled
    step: Callable[[], object]

    @property
    def is_piped(self) -> bool:
        """Whether ranks wait for stages of others."""
        return self.compiled.plan.num_microbatches > 1


def tiny_programs(topology: rv.Topology) -> list[Tiny]:
    """One of every plan, loaded."""
    with TemporaryDirectory() as folder:
        return [
            _tiny(name, knobs, topology, Path(folder, str(i)))
            for i, (name, knobs) in enumerate(TINY_PLANS)
        ]


def _tiny(name: str, knobs: Mapping[str, Any], topology: rv.Topology, folder: Path) -> Tiny:
    num_ranks = dist.get_world_size()
    num = max(4, num_ranks)  # every rank has a layer, and a head of every layer
    sizes = {"layers": num, "heads": num, "width": 4 * num}
    model, inputs = build("gpt", **sizes), example_inputs("gpt", num_ranks, **sizes)
    plan = Plan(capture(model, inputs), range(num_ranks))
    PLANS[name](plan, **knobs)
    program = compile(plan, topology=topology, optimizer="momentum")
    batch = example_inputs("gpt", len(inputs[0]) * plan.num_microbatches, **sizes)
    trainer = loaded(program, model, folder)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        trainer.step(*batch)
        optimizer.step()
        optimizer.zero_grad()

    return Tiny(program, step)


def with_overheads(
    tiny: Sequence[Tiny], topology: rv.Topology, profile: DeviceProfile
) -> DeviceProfile:
    """A profile with the overheads of steps that are timed now; it knows the ops in them."""
    steps = [_step_secs(each.step) for each in tiny]
    worked = replace(profile, **_of_work(tiny, steps, topology, profile))
    found: DeviceProfile = shared(_of_turns(tiny, steps, topology, worked))
    return found


@dataclass(frozen=True)
class _Secs:
    """Of a step: the median of several.

    Attributes:
        step: of the slowest rank.
        cpu: of the processor, mean of the ranks.
    """

    step: float
    cpu: float


def _step_secs(step: Callable[[], object]) -> _Secs:
    steps, cpus = [], []
    for _ in range(TINY_STEPS):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        mine = time.perf_counter() - start, time.process_time() - cpu_start
        every, cpu = zip(*everyone(mine), strict=True)
        steps.append(max(every))
        cpus.append(sum(cpu) / len(cpu))
    return _Secs(median(steps[NUM_WARM:]), median(cpus[NUM_WARM:]))


def _of_work(
    tiny: Sequence[Tiny], steps: Sequence[_Secs], topology: rv.Topology, profile: DeviceProfile
) -> Mapping[str, float]:
    """Overheads that are work, from the processor's time in steps.

    A step takes what its ops and its bytes take, and these for every call of a segment, every
    tensor that is moved, every tensor that is carried between stages, and every op whose backward
    is split into halves. Least squares of the relative errors, none below 0.
    """
    spent = np.array([each.cpu for each in steps])
    free = replace(profile, num_cores=0, **dict.fromkeys(FITTED, 0.0))
    busy = partial(_busy_secs, [each.compiled for each in tiny], topology)
    bare = busy(free)
    nums = [busy(replace(free, **{name: 1.0})) - bare for name in FITTED]
    fitted, _ = nnls(np.stack(nums, axis=1) / spent[:, None], 1 - bare / spent)
    return dict(zip(FITTED, map(float, fitted), strict=True))


def _busy_secs(
    programs: Sequence[Compiled], topology: rv.Topology, profile: DeviceProfile
) -> np.ndarray[Any, Any]:
    """Mean over the ranks of the time in which they compute or communicate, for every program."""
    found = [simulate(each, profile, topology).busy_secs.values() for each in programs]
    return np.array([sum(each) / len(each) for each in found])


def _of_turns(
    tiny: Sequence[Tiny], steps: Sequence[_Secs], topology: rv.Topology, profile: DeviceProfile
) -> DeviceProfile:
    """A profile with what taking turns costs, from the times of whole steps.

    The cores that are there to work, of steps in which all ranks always work; then the time until a
    rank goes on that waited, of pipelines. Each has the least sum of relative errors.
    """

    def error(profile: DeviceProfile, is_piped: bool) -> float:
        found = 0.0
        for each, taken in zip(tiny, steps, strict=True):
            if each.is_piped == is_piped:
                found += abs(simulate(each.compiled, profile, topology).secs / taken.step - 1)
        return found

    cores = (replace(profile, num_cores=share * profile.num_cores) for share in CORE_SHARES)
    best = min(cores, key=partial(error, is_piped=False))
    wakes = (replace(best, wake_secs=secs) for secs in WAKES_SECS)
    return min(wakes, key=partial(error, is_piped=True))
