"""Overheads: the costs of the runtime and of sharing cores, measured by steps of a tiny model.

The ops of this model take almost no time, so its steps consist almost only of overheads.
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
"""Plans of the tiny GPT, with their options."""

TINY_STEPS, NUM_WARM = 25, 2

FITTED = ("segment_secs", "move_secs", "p2p_secs", "split_secs")
"""Fields of a profile that are fitted to processor times."""

CORE_SHARES = tuple(0.75 + 0.025 * i for i in range(11))
"""Candidate shares of the cores that are left for work when ranks take turns on them.

A smaller share would mean that other programs used the cores.
"""

WAKES_SECS = tuple(50e-6 * i for i in range(31))
"""Candidates for the seconds from the end of a wait until the rank continues (``wake_secs``)."""


@dataclass(frozen=True)
class Tiny:
    """A program of the tiny model, its training method on this rank, and a batch."""

    compiled: Compiled
    method: Method
    batch: Sequence[Tensor]


# --- measured, by all ranks together ------------------------------------------------------------


def tiny_programs(topology: rv.Topology) -> list[Tiny]:
    """The loaded programs of all ``TINY_PLANS``; collective."""
    model, programs = programs_on(dist.get_world_size(), topology)
    with TemporaryDirectory() as folder:
        return [_loaded(program, model, Path(folder, str(i))) for i, program in enumerate(programs)]


def programs_on(num_ranks: int, topology: rv.Topology) -> tuple[nn.Module, list[Compiled]]:
    """The tiny model, and the programs of all ``TINY_PLANS``; not collective."""
    sizes = _sizes(num_ranks)
    model, inputs = build("gpt", **sizes), example_inputs("gpt", num_ranks, **sizes)
    graph, programs = capture(model, inputs), []
    for name, options in TINY_PLANS:
        plan = Plan(graph, range(num_ranks))
        PLANS[name](plan, **options)
        programs.append(compile(plan, topology=topology, optimizer="momentum"))
    return model, programs


def _sizes(num_ranks: int) -> dict[str, Any]:
    """Sizes of the tiny model: at least one layer per rank, and one head per rank in each layer."""
    num = max(4, num_ranks)
    return {"layers": num, "heads": num, "width": 4 * num}


def _loaded(program: Compiled, model: nn.Module, folder: Path) -> Tiny:
    num_ranks, num = dist.get_world_size(), program.plan.num_microbatches
    batch = example_inputs("gpt", num_ranks * num, **_sizes(num_ranks))
    return Tiny(program, Method.of_trainer(loaded(program, model, folder)), batch)


def with_overheads(
    tiny: Sequence[Tiny], topology: rv.Topology, profile: DeviceProfile
) -> DeviceProfile:
    """Time the tiny programs now and add the fitted overheads to a profile; collective.

    Args:
        tiny: result of ``tiny_programs``.
        topology: the links, as fast as if every rank had a core of its own.
        profile: a profile with the times of the programs' ops.
    """
    steps = [_step_secs(each) for each in tiny]
    programs = [each.compiled for each in tiny]
    is_first = dist.get_rank() == 0
    found: DeviceProfile = shared(fitted(programs, steps, topology, profile) if is_first else None)
    return found


def _step_secs(tiny: Tiny) -> StepSecs:
    """The median times of several steps."""
    steps = [timed(tiny.method, tiny.batch) for _ in range(TINY_STEPS)][NUM_WARM:]
    return StepSecs(median(each.step for each in steps), median(each.cpu for each in steps))


# --- fitted ---------------------------------------------------------------------------------------


def fitted(
    programs: Sequence[Compiled],
    steps: Sequence[StepSecs],
    topology: rv.Topology,
    profile: DeviceProfile,
) -> DeviceProfile:
    """Fit the overheads of a profile so that simulated steps take as long as measured ones.

    Law (tests/bench/test_machine.py): if the steps were simulated, the fit returns the overheads
    with which they were simulated.
    """
    worked = replace(profile, **_of_work(programs, steps, topology, profile))
    return _of_turns(programs, steps, topology, worked)


def _of_work(
    programs: Sequence[Compiled],
    steps: Sequence[StepSecs],
    topology: rv.Topology,
    profile: DeviceProfile,
) -> Mapping[str, float]:
    """Overheads that are work of the processor, fitted to the processor times of steps.

    The processor time of a step is the time of its ops and bytes, plus one overhead for each call
    of a segment, each moved tensor, each tensor that is sent between stages, and each op whose
    backward is split into halves. The fit minimizes the squares of the relative errors, with all
    overheads at least 0.
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
    """Seconds in which a rank computes or communicates, mean over the ranks, ``[programs]``."""
    found = [simulate(each, profile, topology).busy_secs.values() for each in programs]
    return np.array([sum(each) / len(each) for each in found])


def _of_turns(
    programs: Sequence[Compiled],
    steps: Sequence[StepSecs],
    topology: rv.Topology,
    profile: DeviceProfile,
) -> DeviceProfile:
    """Fit the costs of sharing cores, ``num_cores`` and ``wake_secs``, to the wall times of steps.

    First ``num_cores`` is chosen, by the programs without pipeline, in which all ranks always work.
    Then ``wake_secs`` is chosen, by the pipelines. Each is the candidate with the least sum of
    relative errors.
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
