"""Machine: the simulator's data about this machine, measured by all ranks together.

``rvdcomm`` calibrate measures the links, and ``simulator.measured`` the ops. The overheads of the
runtime come from steps of a tiny model (``overheads.py``). All methods are collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import rvdcomm as rv
from bench.machine.method import Method, loaded, shared, timed
from bench.machine.overheads import tiny_programs, with_overheads
from bench.machine.race import race
from rvdcomm.calibration import Effort, calibrate
from superscaler_core import Graph
from superscaler_core.compiled import Compiled, compile
from superscaler_core.evaluation import Candidate, Request, Trial, compiled
from superscaler_core.plan import Plan
from superscaler_core.planners import PLANNERS, search_request
from superscaler_core.plans import PLANS
from superscaler_core.simulator import DeviceProfile, simulate
from superscaler_core.simulator.measured import measured, num_cores_here

OPTIMIZER = "momentum"
"""The optimizer with which the benchmarks train."""

NUM_SEARCHES = 3
"""Number of searches; after each, the ops of its fastest plans are measured for the next one."""

PLANS_TO_MEASURE = 40
"""Number of fastest plans per search whose ops are measured."""

PLANS_TO_RACE = 12
"""Number of plans in the race: their predicted times differ by less than the prediction error."""

NUM_WARM, STEPS_OF_VISIT = 2, 3
"""Steps of each plan before the race, and steps per visit in the race."""

GraphOf = Callable[[int], Graph]
"""From the samples of a microbatch to the model's graph."""


class Machine:
    """The measured data of this machine; equal on all ranks.

    Args:
        op_secs: seconds spent on measuring each op.
        effort: effort of measuring the links.
        waits: whether ops of the models mostly wait (``waiting``), which needs no core.
        say: called with the name of each measurement before it starts.

    Attributes:
        topology: the links, as fast as if every rank had a core of its own.
        profile: profile of a rank, with the times of all ops that were measured.
    """

    def __init__(
        self,
        *,
        op_secs: float = 0.03,
        effort: Effort | None = None,
        waits: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        say("calibrate links")
        links, _ = calibrate(effort=effort or Effort())
        self.topology = with_a_core_each(rv.Network.of(links).nearest_levels)
        say("measure overheads of the runtime")
        self._op_secs, self._waits, self._say = op_secs, waits, say
        tiny = tiny_programs(self.topology)
        profile = self._measured([each.compiled for each in tiny], ())
        self.profile = with_overheads(tiny, self.topology, profile)
        if waits:
            self.profile = replace(self.profile, num_cores=0)

    def measure_ops(self, programs: Sequence[Compiled]) -> None:
        """Measure those ops of ``programs`` whose times are unknown, and add them to the profile.

        Args:
            programs: the programs, equal on all ranks that measure (as many as there are cores).
        """
        known = self.profile.op_secs
        found = self._measured(programs, known)
        self.profile = replace(self.profile, op_secs={**known, **found.op_secs})

    def _measured(self, programs: Sequence[Compiled], known: Collection[str]) -> DeviceProfile:
        """The profile that the first rank measures."""
        dist.barrier()
        mine = None
        if _measures():
            clock = time.perf_counter if self._waits else None
            mine = measured(programs, op_secs=self._op_secs, known=known, clock=clock)
        return shared(mine)

    def request(self, graph_of: GraphOf, batch: int) -> Request:
        """The request to a planner: train a model with momentum on all ranks.

        Args:
            graph_of: makes the model's graph.
            batch: samples per step.
        """
        sizes = tuple(n for n in range(1, batch + 1) if batch % n == 0)
        devices = tuple(range(dist.get_world_size()))
        profile = self.profile
        return Request(
            graph_of, sizes, batch, devices, self.topology, profile, profile.memory_bytes,
            optimizer=OPTIMIZER,
        )  # fmt: skip

    def search(self, graph_of: GraphOf, batch: int, **limits: Any) -> list[Planned]:
        """Search several times, each time with more measured ops, and return the last best plans.

        Args:
            graph_of, batch: as in ``request``; equal on all ranks.
            limits: limits of each search by ``auto``, as in ``search_request``. Only the first rank
                searches.

        Returns:
            Plans whose ops are all measured, fastest first.
        """
        self.measure_ops([_whole(self.request(graph_of, batch))])
        for turn in range(NUM_SEARCHES):
            self._say(f"search {turn + 1} of {NUM_SEARCHES}")
            request = self.request(graph_of, batch)
            mine = None
            if dist.get_rank() == 0:
                found = search_request(request, PLANNERS["auto"], **limits)
                mine = distinct((found.best, *found.tried))[:PLANS_TO_MEASURE]
            best: list[Planned] = shared(mine)
            programs = [each.compiled(request) for each in best] if _measures() else []
            self.measure_ops(programs)
        # Simulated again: a plan may have seemed fast because the time of an op was unknown.
        steps = shared([simulate(each, self.profile, self.topology).secs for each in programs])
        priced = (replace(plan, secs=secs) for plan, secs in zip(best, steps, strict=True))
        return sorted(priced, key=lambda plan: plan.secs)

    def raced(
        self, plans: Sequence[Planned], request: Request, model: nn.Module, batch: Sequence[Tensor]
    ) -> list[Planned]:
        """Measure the steps of the best plans in a race; the winner is first.

        A race is needed because the predicted times of the best plans are too close.

        Args:
            plans: plans, fastest by prediction first; only the first ``PLANS_TO_RACE`` race.
            request: the result of ``request``.
            model: the model whose parameter values the programs start with; it does not change.
            batch: the inputs of a whole step.
        """
        racing = plans[:PLANS_TO_RACE]
        self._say(f"race of {len(racing)} plans")
        with TemporaryDirectory() as folder:
            methods = [
                Method.of_trainer(loaded(plan.compiled(request), model, Path(folder, str(i))))
                for i, plan in enumerate(racing)
            ]
        for method in methods:
            for _ in range(NUM_WARM):
                timed(method, batch)
        found = race(
            len(racing),
            lambda i: [timed(methods[i], batch).step for _ in range(STEPS_OF_VISIT)],
        )
        return [replace(racing[i], measured_secs=secs) for i, secs in found.items()]


@dataclass(frozen=True)
class Planned:
    """A plan that a search found; it can be sent to other ranks.

    Attributes:
        name, samples, sprogram: as in ``Candidate``.
        secs: simulated seconds of a step.
        measured_secs: measured seconds of a step in the race; infinite before the race.
    """

    name: str
    samples: int
    sprogram: Callable[..., None]
    secs: float
    measured_secs: float = inf

    def compiled(self, request: Request) -> Compiled:
        """The program of the plan."""
        return compiled(request, Candidate("", self.samples, self.sprogram))


def distinct(trials: Iterable[Trial]) -> list[Planned]:
    """All plans that fit, fastest first; of plans with equal time and memory, only the first.

    Estimates are included, because a search looks at few of its plans in full. A plan that was
    looked at in full has the time of this look.
    """
    in_full_last = sorted(trials, key=lambda trial: not trial.is_estimate)
    by_candidate = {trial.candidate: trial for trial in in_full_last}
    kept: dict[tuple[float, int], Planned] = {}
    for trial in filter(lambda trial: trial.fits, by_candidate.values()):
        of = trial.candidate
        plan = Planned(of.name, of.samples, of.sprogram, trial.secs)
        kept.setdefault((trial.secs, trial.peak_bytes), plan)
    return sorted(kept.values(), key=lambda plan: plan.secs)


def _measures() -> bool:
    """Whether this rank measures ops.

    As many ranks as there are cores measure at the same time, because ranks share the memory.
    """
    return dist.get_rank() < num_cores_here()


def _whole(request: Request) -> Compiled:
    """The program of the largest microbatch on one device."""
    plan = Plan(request.graph_of(request.samples[-1]), [0])
    PLANS["data_parallel"](plan)
    return compile(plan, optimizer=request.optimizer)


def with_a_core_each(topology: rv.Topology) -> rv.Topology:
    """Scale links that all ranks measured at once to the speed with one core per rank.

    Ranks of one host communicate by copying, and the simulator itself makes them share the cores.
    Links between emulated hosts stay as they are, because they are slower than the cores.
    """
    if len(topology.levels) > 1:
        return topology
    share = max(1.0, dist.get_world_size() / num_cores_here())
    (level,) = topology.levels
    link = rv.Link(level.link.alpha_secs / share, level.link.bytes_per_sec * share)
    return rv.Topology.single_host(dist.get_world_size(), link.alpha_secs, link.bytes_per_sec)
