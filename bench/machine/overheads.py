"""Overheads: what the runtime and taking turns on cores cost, from steps of a tiny model.

Its ops take next to nothing, so its steps are nearly all overheads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor, nn

import rvdcomm as rv
from bench.machine.method import Method, StepSecs, loaded, shared, timed
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
    """A program of the tiny model, its step on this rank, and a batch of it."""

    compiled: Compiled
    method: Method
    batch: Sequence[Tensor]


# --- measured, by all ranks together ------------------------------------------------------------


def tiny_programs(topology: rv.Topology) -> list[Tiny]:
    """One of every plan, loaded; collective."""
    model, programs = programs_on(dist.get_world_size(), topology)
    with TemporaryDirectory() as folder:
        return [_loaded(program, model, Path(folder, str(i))) for i, program in enumerate(programs)]


def programs_on(num_ranks: int, topology: rv.Topology) -> tuple[nn.Module, list[Compiled]]:
    """The tiny model, and a program of every plan; not collective."""
    sizes = _sizes(num_ranks)
    model, inputs = build("gpt", **sizes), example_inputs("gpt", num_ranks, **sizes)
    graph, programs = capture(model, inputs), []
    for name, knobs in TINY_PLANS:
        plan = Plan(graph, range(num_ranks))
        PLANS[name](plan, **knobs)
        programs.append(compile(plan, topology=topology, optimizer="momentum"))
    return model, programs


def _sizes(num_ranks: int) -> dict[str, Any]:
    """Every rank has a layer, and a head of every layer."""
    num = max(4, num_ranks)
    return {"layers": num, "heads": num, "width": 4 * num}


def _loaded(program: Compiled, model: nn.Module, folder: Path) -> Tiny:
    num_ranks, num = dist.get_world_size(), program.plan.num_microbatches
    batch = example_inputs("gpt", num_ranks * num, **_sizes(num_ranks))
    return Tiny(program, Method.of_trainer(loaded(program, model, folder)), batch)


def with_overheads(
    tiny: Sequence[Tiny], topology: rv.Topology, profile: DeviceProfile
) -> DeviceProfile:
    """A profile with the overheads of steps that are timed now; collective.

    Args:
        tiny: of ``tiny_programs``.
        topology: links as fast as where every rank has a core.
        profile: with the times of the programs' ops.
    """
    steps = [_step_secs(each) for each in tiny]
    programs = [each.compiled for each in tiny]
    is_first = dist.get_rank() == 0
    found: DeviceProfile = shared(fitted(programs, steps, topology, profile) if is_first else None)
    return found


def _step_secs(tiny: Tiny) -> StepSecs:
    """The median of some steps."""
    steps = [timed(tiny.method, tiny.batch) for _ in range(TINY_STEPS)][NUM_WARM:]
    return StepSecs(median(each.step for each in steps), median(each.cpu for each in steps))


# --- fitted ---------------------------------------------------------------------------------------


def fitted(
    programs: Sequence[Compiled],
    steps: Sequence[StepSecs],
    topology: rv.Topology,
    profile: DeviceProfile,
) -> DeviceProfile:
    """A profile with overheads by which the steps of some programs take as long as they did.

    Law (tests/bench/test_machine.py): from simulated steps it finds the overheads by
    which they were simulated.
    """
    worked = replace(profile, **_of_work(programs, steps, topology, profile))
    return _of_turns(programs, steps, topology, worked)


def _of_work(
    programs: Sequence[Compiled],
    steps: Sequence[StepSecs],
    topology: rv.Topology,
    profile: DeviceProfile,
) -> Mapping[str, float]:
    """Overheads that are work, from the processor's time in steps.

    A step takes what its ops and its bytes take, and these for every call of a segment, every
    tensor that is moved, every tensor that is carried between stages, and every op whose backward
    is split into halves. Least squares of the relative errors, none below 0.
    """
    spent = np.array([each.cpu for each in steps])
    free = replace(profile, num_cores=0, **dict.fromkeys(FITTED, 0.0))
    busy = partial(busy_secs, programs, topology)
    bare = busy(free)
    nums = [busy(replace(free, **{name: 1.0})) - bare for name in FITTED]
    fitted, _ = nnls(np.stack(nums, axis=1) / spent[:, None], 1 - bare / spent)
    return dict(zip(FITTED, map(float, fitted), strict=True))


def busy_secs(
    programs: Sequence[Compiled], topology: rv.Topology, profile: DeviceProfile
) -> np.ndarray[Any, Any]:
    """Mean over the ranks of the time in which they compute or communicate, for every program."""
    found = [simulate(each, profile, topology).busy_secs.values() for each in programs]
    return np.array([sum(each) / len(each) for each in found])


def _of_turns(
    programs: Sequence[Compiled],
    steps: Sequence[StepSecs],
    topology: rv.Topology,
    profile: DeviceProfile,
) -> DeviceProfile:
    """A profile with what taking turns costs, from the times of whole steps.

    The cores that are there to work, of steps in which all ranks always work; then the time until a
    rank goes on that waited, of pipelines. Each has the least sum of relative errors.
    """

    def error(profile: DeviceProfile, is_piped: bool) -> float:
        found = 0.0
        for each, taken in zip(programs, steps, strict=True):
            if (each.plan.num_microbatches > 1) == is_piped:
                found += abs(simulate(each, profile, topology).secs / taken.step - 1)
        return found

    cores = (replace(profile, num_cores=share * profile.num_cores) for share in CORE_SHARES)
    best = min(cores, key=partial(error, is_piped=False))
    wakes = (replace(best, wake_secs=secs) for secs in WAKES_SECS)
    return min(wakes, key=partial(error, is_piped=True))
