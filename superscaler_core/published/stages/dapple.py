"""DAPPLE's planner: replicated stages of a synchronous pipeline, by the time of a step.

Objective: with M microbatches, T the time of the slowest stage and stages counted from 0,

    T (M - 1) + total + transfers + max over i of max(0, allreduce_i - i T)

seconds. ``total`` is the computation of a microbatch on one device, which does not depend on the
cut. ``transfers`` is the time to move a microbatch between stages, forward and backward. Stage i
has done its last backward i T earlier than stage 0, so that much of its all-reduce is hidden.

Method: for every limit on T (``limits``) and every number of stages, compute the cut with the least
transfers and the cut with the least exposed all-reduce. If one cut has both, it is the best.
Otherwise the least transfers are computed for limits on the exposed all-reduce (``limits`` again).
Complexity: ``O(K**2 D N S)`` for one cut of K layers on D devices with N numbers of replicas and up
to S stages.

Differences from the published code (``sync_pipeline.rs`` and its orchestration): that code searches
recursively, with three ways to place a stage, and keeps the best cut of each subproblem, which need
not be part of the best cut; ours is the optimum of the objective over all cuts. Our all-reduce is
the problem's ``sync_secs``, which includes the update. A cut has at most as many stages as
microbatches.

Source: Fan et al., DAPPLE, PPoPP 2021, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler_core.published.stages.candidates import Candidates, sums
from superscaler_core.published.stages.chains import Chains, Chosen
from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.degrees import Degrees
from superscaler_core.published.stages.limits import TOLERANCE, least_of_limits
from superscaler_core.published.stages.points import prefixes
from superscaler_core.published.stages.problem import Array, StageProblem


def dapple(problem: StageProblem) -> StageCut:
    """Cut a chain of layers into replicated stages, by the time of a synchronous step.

    Raises:
        PlanError: no cut fits in memory.
    """
    replicas = [each for each in problem.degrees if each.tensor == 1]
    part = problem.with_degrees(replicas)
    candidates = Candidates.of(part, prefixes(problem))
    entering, _ = candidates.crossing_bytes(problem)
    moves = np.vectorize(problem.transfer_secs)(entering)[:, :, None]
    reduces = sums(part, candidates.points, "sync_secs")

    def rest(limit: float) -> tuple[float, list[Chosen]]:
        return _Limited(part, candidates, moves, reduces, limit).least()

    secs, weight = candidates.secs, problem.microbatches - 1
    lowest, _ = Chains(
        candidates, secs, problem.num_devices, by_max=True, longest=problem.microbatches
    ).least()
    value, stages = least_of_limits(secs, lowest, weight, rest)
    if not stages:
        raise problem.no_cut("DAPPLE")
    alone = problem.degrees.index(Degrees(1, 1))
    total = float(problem.table("secs")[:, alone].sum())
    return problem.placed(
        [(candidates.layers(p, q), replicas[c]) for p, q, c in stages], total + value
    )


@dataclass(frozen=True, eq=False)
class _Limited:
    """Cuts whose stages take at most ``limit`` seconds.

    Attributes:
        problem: the problem, with data-parallel degrees only.
        candidates: its possible stages.
        moves, reduces: seconds in which a stage receives its inputs, and reduces gradients,
            ``[p, q, c]``.
        limit: the most seconds of a stage.
    """

    problem: StageProblem
    candidates: Candidates
    moves: Array
    reduces: Array
    limit: float

    def least(self) -> tuple[float, list[Chosen]]:
        """The least sum of the transfers and the longest exposed all-reduce, with its stages."""
        fewest, shortest = self._chains(self.moves), self._chains(self.reduces, True)
        best: tuple[float, list[Chosen]] = (np.inf, [])
        bounds = sum(chains.best[:, 0].min(axis=1) for chains in (fewest, shortest))
        for num in np.argsort(bounds[1:]) + 1:
            bound = float(bounds[num])
            if bound >= best[0] * (1 - TOLERANCE):
                break
            ways = [chains.least(num_stages=num)[1] for chains in (fewest, shortest)]
            best = min([best, *((self._secs(way), way) for way in ways)], key=lambda pair: pair[0])
            if bound < best[0] * (1 - TOLERANCE):
                best = min(best, self._between(num, shortest), key=lambda pair: pair[0])
        return best

    def _chains(self, values: Array, by_max: bool = False, **more: Any) -> Chains:
        allowed = np.where(self.candidates.secs <= self.limit, values, np.inf)
        longest = more.pop("longest", self.problem.microbatches)
        return Chains(
            self.candidates, allowed, self.problem.num_devices, by_max=by_max,
            fade=self.limit, longest=longest, **more,
        )  # fmt: skip

    def _between(self, num: int, shortest: Chains) -> tuple[float, list[Chosen]]:
        """The best cut into ``num`` stages, over all limits on the exposed all-reduce."""
        delays = self.limit * np.arange(num)
        exposed = np.maximum(0.0, self.reduces[..., None] - delays)

        def fewest(bound: float) -> tuple[float, list[Chosen]]:
            def may_lead(left: int) -> NDArray[np.bool_]:
                return np.asarray(self.reduces - delays[num - left] <= bound)

            return self._chains(self.moves, longest=num, may_lead=may_lead).least(num_stages=num)

        lowest, _ = shortest.least(num_stages=num)
        value, stages = least_of_limits(exposed, lowest, 1.0, fewest)
        return value, stages or []

    def _secs(self, stages: list[Chosen]) -> float:
        """Seconds of the transfers and of the longest exposed all-reduce."""
        exposed = [self.reduces[at] - i * self.limit for i, at in enumerate(stages)]
        return float(sum(self.moves[p, q, 0] for p, q, _ in stages) + max(0.0, *exposed))
