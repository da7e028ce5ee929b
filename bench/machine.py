"""Machine: this machine as the simulator knows it, measured by all ranks together.

Links are measured by ``rvdcomm`` calibrate, ops by ``simulator.measured``, and overheads of the
runtime by steps of a tiny model. All functions and methods are collective over the world.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from bench.training_method import everyone
from rvdcomm.calibration import Effort, calibrate
from superscaler_core.compiled import Compiled, compile
from superscaler_core.front_end import capture
from superscaler_core.models import build, example_inputs
from superscaler_core.plan import Plan
from superscaler_core.planners.search.evaluate import compiled
from superscaler_core.planners.search.request import Request, Trial
from superscaler_core.planners.search.search import search_request
from superscaler_core.planners.table import PLANNERS
from superscaler_core.plans import PLANS
from superscaler_core.run.load import load
from superscaler_core.run.trainer import Trainer
from superscaler_core.simulator import DeviceProfile, simulate
from superscaler_core.simulator.measured import measured

TINY_PLANS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("data_parallel", {}),
    ("zero3", {}),
    ("megatron", {}),
    ("one_f_one_b", {"microbatches": 4}),
    ("one_f_one_b", {"microbatches": 12}),
    ("zero_bubble", {"microbatches": 4}),
    ("zero_bubble", {"microbatches": 12}),
)
"""Plans of a tiny GPT, whose steps are nearly all overheads of the runtime."""

TINY_STEPS, NUM_WARM = 25, 2

OVERHEADS = ("segment_secs", "move_secs", "carry_secs", "split_secs")

CORE_SHARES = tuple(0.5 + 0.025 * i for i in range(21))
"""Of the cores, which ranks have that take turns on them: candidates."""

WAKES_SECS = tuple(50e-6 * i for i in range(31))
"""Until a rank goes on that waited: candidates."""

NUM_SEARCHES = 3
"""After each but the last the ops of the fastest plans are measured, so that the next one knows
their times."""

PLANS_TO_MEASURE = 40
"""The fastest plans of a search, whose ops are measured."""

RequestOf = Callable[[rv.Topology, DeviceProfile], Request]
"""What a planner is asked on a machine."""


class Machine:
    """What is known of this machine; equal on all ranks.

    Args:
        op_secs: to measure an op.
        effort: of measuring links.
        say: hears what is measured.

    Attributes:
        topology: links as fast as where every rank has a core.
        profile: of a rank, with the times of all ops that were measured.
    """

    def __init__(
        self,
        *,
        op_secs: float = 0.03,
        effort: Effort | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        say("calibrate links")
        self.topology = with_a_core_each(calibrate(effort=effort or Effort())[0])
        say("measure overheads of the runtime")
        self._op_secs, self._say = op_secs, say
        with TemporaryDirectory() as folder:
            tiny = [_tiny(number, self.topology, Path(folder)) for number in range(len(TINY_PLANS))]
        self.profile = self._measured([each.compiled for each in tiny], ())
        steps = [_step_secs(each.step) for each in tiny]
        self.profile = replace(self.profile, **_overheads(tiny, steps, self.topology, self.profile))
        self.profile = shared(_shared_cores(tiny, steps, self.topology, self.profile))

    def measure_ops(self, programs: Sequence[Compiled]) -> None:
        """Add the times of all ops of some programs, equal on all ranks, that are not known yet."""
        known = self.profile.op_secs
        found = self._measured(programs, known)
        self.profile = replace(self.profile, op_secs={**known, **found.op_secs})

    def _measured(self, programs: Sequence[Compiled], known: Collection[str]) -> DeviceProfile:
        """What the first rank measures."""
        dist.barrier()
        mine = None
        if _measures():
            mine = measured(programs, op_secs=self._op_secs, known=known)
        return shared(mine)

    def search(self, request_of: RequestOf, **limits: Any) -> list[Planned]:
        """The best plans of the last of several searches, each of which knows more times of ops.

        Args:
            request_of: the same on all ranks.
            limits: of every search by ``auto``, as in ``search_request``; the first rank searches.

        Returns:
            Plans whose ops are all measured, fastest first.
        """
        self.measure_ops([_whole(request_of(self.topology, self.profile))])
        for turn in range(NUM_SEARCHES):
            self._say(f"search {turn + 1} of {NUM_SEARCHES}")
            request = request_of(self.topology, self.profile)
            mine = None
            if dist.get_rank() == 0:
                found = search_request(request, PLANNERS["auto"], **limits)
                mine = _distinct((found.best, *found.tried))[:PLANS_TO_MEASURE]
            best: list[Planned] = shared(mine)
            programs = [each.compiled(request) for each in best] if _measures() else []
            self.measure_ops(programs)
        # A plan may have been the fastest because the time of an op was not known.
        steps = shared([simulate(each, self.profile, self.topology).secs for each in programs])
        priced = (replace(plan, secs=secs) for plan, secs in zip(best, steps, strict=True))
        return sorted(priced, key=lambda plan: plan.secs)


@dataclass(frozen=True)
class Planned:
    """A plan that a search found; other ranks can be sent it.

    Attributes:
        name, samples, sprogram: as of a ``Candidate``.
        secs: its simulated step.
    """

    name: str
    samples: int
    sprogram: Callable[..., None]
    secs: float

    def compiled(self, request: Request) -> Compiled:
        """Its program."""
        return compiled(request, self.samples, self.sprogram)


def _distinct(trials: Iterable[Trial]) -> list[Planned]:
    """All plans that fit, fastest first, and of those that take and need the same the first."""
    kept: dict[tuple[float, int], Planned] = {}
    for trial in trials:
        if trial.fits and not trial.is_estimate:
            of = trial.candidate
            plan = Planned(of.name, of.samples, of.sprogram, trial.secs)
            kept.setdefault((trial.secs, trial.peak_bytes), plan)
    return sorted(kept.values(), key=lambda plan: plan.secs)


def _measures() -> bool:
    """Whether this rank measures ops: as many do as there are cores, as they share the memory."""
    return dist.get_rank() < num_cores()


def _whole(request: Request) -> Compiled:
    """A program of the largest microbatch on one device."""
    plan = Plan(request.graph_of(request.samples[-1]), [0])
    PLANS["data_parallel"](plan)
    return compile(plan, optimizer=request.optimizer)


def shared(mine: Any) -> Any:
    """The first rank's value."""
    values = [mine]
    dist.broadcast_object_list(values)
    return values[0]


def num_cores() -> int:
    """Cores that the ranks of this machine share."""
    return len(os.sched_getaffinity(0))


def with_a_core_each(topology: rv.Topology) -> rv.Topology:
    """Links as fast as where every rank has a core, from links that all ranks measured at once.

    Ranks of one host communicate by copying, and the simulator makes them share its cores. Links
    between emulated hosts stay as they are: they are slower than the cores.
    """
    if len(topology.levels) > 1:
        return topology
    share = max(1.0, dist.get_world_size() / num_cores())
    (level,) = topology.levels
    link = rv.Link(level.link.alpha_secs / share, level.link.bytes_per_sec * share)
    return rv.Topology.single_host(dist.get_world_size(), link.alpha_secs, link.bytes_per_sec)


# --- overheads of the runtime -------------------------------------------------------------------


@dataclass(frozen=True)
class _Tiny:
    """A program of a tiny model, and its step on this rank."""

    compiled: Compiled
    step: Callable[[], object]
    is_piped: bool


def _tiny(number: int, topology: rv.Topology, folder: Path) -> _Tiny:
    name, knobs = TINY_PLANS[number]
    num = max(4, dist.get_world_size())  # every rank has a layer, and a head of every layer
    sizes = {"layers": num, "heads": num, "width": 4 * num}
    model, inputs = build("gpt", **sizes), example_inputs("gpt", dist.get_world_size(), **sizes)
    plan = Plan(capture(model, inputs), range(dist.get_world_size()))
    PLANS[name](plan, **knobs)
    program = compile(plan, topology=topology, optimizer="momentum")
    batch = example_inputs("gpt", len(inputs[0]) * plan.num_microbatches, **sizes)
    trainer = loaded(program, model, folder / str(number))
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        trainer.step(*batch)
        optimizer.step()
        optimizer.zero_grad()

    return _Tiny(program, step, plan.num_microbatches > 1)


def loaded(program: Compiled, model: torch.nn.Module, folder: Path) -> Trainer:
    """This rank's share of a program, with the values of a model; the first rank writes it."""
    path = shared(folder)
    if dist.get_rank() == 0:
        program.save(path)
    dist.barrier()
    trainer = load(path)
    trainer.load_state_dict(model.state_dict())
    dist.barrier()
    return trainer


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


def _overheads(
    tiny: Sequence[_Tiny], steps: Sequence[_Secs], topology: rv.Topology, profile: DeviceProfile
) -> Mapping[str, float]:
    """Overheads of a profile, from the processor's time in steps of tiny programs.

    A step takes what its ops and its bytes take, and these for every call of a segment, every
    tensor that is moved, every tensor that is carried between stages, and every op whose backward
    is split into halves. Least squares of the relative errors, none below 0.
    """
    spent = np.array([each.cpu for each in steps])
    free = replace(profile, num_cores=0, **dict.fromkeys(OVERHEADS, 0.0))
    busy = partial(_busy_secs, [each.compiled for each in tiny], topology)
    bare = busy(free)
    nums = [busy(replace(free, **{name: 1.0})) - bare for name in OVERHEADS]
    fitted, _ = nnls(np.stack(nums, axis=1) / spent[:, None], 1 - bare / spent)
    return dict(zip(OVERHEADS, map(float, fitted), strict=True))


def _busy_secs(
    programs: Sequence[Compiled], topology: rv.Topology, profile: DeviceProfile
) -> np.ndarray[Any, Any]:
    """Mean over the ranks of the time in which they compute or communicate, for every program."""
    found = [simulate(each, profile, topology).busy_secs.values() for each in programs]
    return np.array([sum(each) / len(each) for each in found])


def _shared_cores(
    tiny: Sequence[_Tiny], steps: Sequence[_Secs], topology: rv.Topology, profile: DeviceProfile
) -> DeviceProfile:
    """A profile with what sharing cores costs, from the times of whole steps.

    The cores that are there to work, of steps in which all ranks always work; then the time until a
    rank goes on that waited, of pipelines. Each has the least sum of relative errors.
    """

    def error(profile: DeviceProfile, is_piped: bool) -> float:
        found = 0.0
        for each, taken in zip(tiny, steps, strict=True):
            if each.is_piped == is_piped:
                found += abs(simulate(each.compiled, profile, topology).secs / taken.step - 1)
        return found

    cores = (replace(profile, num_cores=share * num_cores()) for share in CORE_SHARES)
    best = min(cores, key=partial(error, is_piped=False))
    wakes = (replace(best, wake_secs=secs) for secs in WAKES_SECS)
    return min(wakes, key=partial(error, is_piped=True))
