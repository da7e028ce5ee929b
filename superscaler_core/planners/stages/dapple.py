"""DAPPLE's planner: replicated stages of a synchronous pipeline, by the time of a step.

Objective: with M microbatches, T the time of the slowest stage and stages counted from 0,

    T (M - 1) + total + transfers + max over i of max(0, allreduce_i - i T)

seconds, where ``total`` is a microbatch's computation on one device, whatever the cut, and
``transfers`` the sum over all cuts of a microbatch's bytes, forward and backward. A later stage has
done its last backward earlier, by T for each stage before it, so its all-reduce is hidden so long.

Method: for every limit on T (``limits``) and every number of stages, the least transfers of any
cut, and the least exposed all-reduce of any cut. Where one cut has both it is the best; otherwise
the least transfers are found for limits on the exposed all-reduce (``limits`` again). Complexity:
``O(K**2 D N S)`` for one such cut of K layers on D devices with N numbers of replicas and up to S
stages.

Differences from the published code (``sync_pipeline.rs`` and its orchestration): that searches
recursively with three ways to place a stage and keeps the best cut of each subproblem, which need
not lead to the best whole; ours is the least of its objective over all cuts. The all-reduce is the
problem's ``sync_secs``, which includes the update. At most as many stages as microbatches.

Source: Fan et al., DAPPLE, PPoPP 2021, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler_core.planners.stages.candidates import Candidates, sums
from superscaler_core.planners.stages.chains import Chains, Chosen
from superscaler_core.planners.stages.cut import StageCut
from superscaler_core.planners.stages.degrees import Degrees
from superscaler_core.planners.stages.limits import TOLERANCE, least_of_limits
from superscaler_core.planners.stages.points import prefixes
from superscaler_core.planners.stages.problem import Array, StageProblem


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
        problem: with replicas alone.
        candidates: its stages.
        moves, reduces: seconds that a stage receives, and reduces gradients, ``[p, q, c]``.
        limit: on every stage.
    """

    problem: StageProblem
    candidates: Candidates
    moves: Array
    reduces: Array
    limit: float

    def least(self) -> tuple[float, list[Chosen]]:
        """The least sum of transfers and the longest exposed all-reduce."""
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
        """The best of so many stages, for all limits on what is exposed."""
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
        """Transfers and the longest exposed all-reduce."""
        exposed = [self.reduces[at] - i * self.limit for i, at in enumerate(stages)]
        return float(sum(self.moves[p, q, 0] for p, q, _ in stages) + max(0.0, *exposed))
