"""Machine: this machine as the simulator knows it, measured by all ranks together.

Links are measured by ``rvdcomm`` calibrate, ops by ``simulator.measured``, and overheads of the
runtime by steps of a tiny model (``overheads.py``). All methods are collective.
"""

from __future__ import annotations

import os
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
from superscaler_core.compiled import Compiled, compile
from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Plan
from superscaler_core.planners.search.evaluate import compiled
from superscaler_core.planners.search.request import Request, Trial
from superscaler_core.planners.search.search import search_request
from superscaler_core.planners.table import PLANNERS
from superscaler_core.plans import PLANS
from superscaler_core.simulator import DeviceProfile, simulate
from superscaler_core.simulator.measured import measured

OPTIMIZER = "momentum"
"""By which benchmarks train."""

NUM_SEARCHES = 3
"""After each but the last the ops of the fastest plans are measured, so that the next one knows
their times."""

PLANS_TO_MEASURE = 40
"""The fastest plans of a search, whose ops are measured."""

PLANS_TO_RACE = 12
"""The fastest by prediction: their times differ by less than its error."""

NUM_WARM, STEPS_OF_VISIT = 2, 3
"""Steps of a racer before the race, and of every visit."""

GraphOf = Callable[[int], Graph]
"""A model with a microbatch of so many samples."""


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
        tiny = tiny_programs(self.topology)
        profile = self._measured([each.compiled for each in tiny], ())
        self.profile = with_overheads(tiny, self.topology, profile)

    def measure_ops(self, programs: Sequence[Compiled]) -> None:
        """Add the times of those ops of some programs that are not known yet.

        Args:
            programs: the same on the ranks that measure, which are as many as there are cores.
        """
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

    def request(self, graph_of: GraphOf, batch: int) -> Request:
        """What a planner is asked: to train a model with momentum on all ranks.

        Args:
            graph_of: the model.
            batch: samples of a step.
        """
        sizes = tuple(n for n in range(1, batch + 1) if batch % n == 0)
        devices = tuple(range(dist.get_world_size()))
        profile = self.profile
        return Request(
            graph_of, sizes, batch, devices, self.topology, profile, profile.memory_bytes,
            optimizer=OPTIMIZER,
        )  # fmt: skip

    def search(self, graph_of: GraphOf, batch: int, **limits: Any) -> list[Planned]:
        """The best plans of the last of several searches, each of which knows more times of ops.

        Args:
            graph_of, batch: as of ``request``; the same on all ranks.
            limits: of every search by ``auto``, as in ``search_request``; the first rank searches.

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
                mine = _distinct((found.best, *found.tried))[:PLANS_TO_MEASURE]
            best: list[Planned] = shared(mine)
            programs = [each.compiled(request) for each in best] if _measures() else []
            self.measure_ops(programs)
        # A plan may have been the fastest because the time of an op was not known.
        steps = shared([simulate(each, self.profile, self.topology).secs for each in programs])
        priced = (replace(plan, secs=secs) for plan, secs in zip(best, steps, strict=True))
        return sorted(priced, key=lambda plan: plan.secs)

    def raced(
        self, plans: Sequence[Planned], request: Request, model: nn.Module, batch: Sequence[Tensor]
    ) -> list[Planned]:
        """Plans with measured steps, the winner first: predictions near the best are too close.

        Args:
            plans: fastest first by prediction; those behind the first ``PLANS_TO_RACE`` stay away.
            request: of ``request``.
            model: whose values the programs start with; it does not change.
            batch: a whole one.
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
    """A plan that a search found; other ranks can be sent it.

    Attributes:
        name, samples, sprogram: as of a ``Candidate``.
        secs: its simulated step.
        measured_secs: its step in a race; infinite before.
    """

    name: str
    samples: int
    sprogram: Callable[..., None]
    secs: float
    measured_secs: float = inf

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
