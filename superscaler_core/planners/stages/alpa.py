"""Alpa's inter-op planner: stages on submeshes, by the time of a step.

Objective: with B microbatches and stages that take t_i seconds of each,

    sum of t_i + (B - 1) max of t_i

for stages that use all devices. For every limit on the slowest stage, the least sum is

    F(s, k, d) = min over i and submeshes of t(k, i, submesh) + F(s - 1, i + 1, d - size)

with s stages from layer k on d devices; a stage that is followed by more stages than it has memory
for is left out.

Complexity: ``O(K**2 D N S)`` for a limit, with K layers, D devices, N sizes of submeshes and S
stages that memory tells apart; the number of limits tried is logarithmic where few are near the
best (``limits``), and at most the ``K**2 N`` different times of stages.

Differences from the published code (``stage_construction.py``): its search over limits goes upward
in steps of at least 1e-6 s and stops where ``B * limit`` is above the best; ours is exact to a
relative 1e-9. How a stage uses its submesh is one of the problem's degrees, chosen before by time;
there it is the result of the intra-op planner.

Source: Zheng et al., Alpa, OSDI 2022, section 5.
"""

from __future__ import annotations

import numpy as np

from superscaler_core.planners.stages.candidates import Candidates
from superscaler_core.planners.stages.chains import Chains, Chosen
from superscaler_core.planners.stages.cut import StageCut
from superscaler_core.planners.stages.limits import least_of_limits
from superscaler_core.planners.stages.points import prefixes
from superscaler_core.planners.stages.problem import StageProblem


def alpa(problem: StageProblem) -> StageCut:
    """Cut a chain of layers into stages on all devices, by the time of a step.

    Raises:
        PlanError: no cut fits in memory, or none uses all devices.
    """
    candidates = Candidates.of(problem, prefixes(problem))
    value, stages = alpa_stages(candidates, problem.num_devices, problem.microbatches)
    if not stages:
        raise problem.no_cut("Alpa")
    return problem.placed(
        [(candidates.layers(p, q), problem.degrees[c]) for p, q, c in stages], value
    )


def alpa_stages(
    candidates: Candidates, num_devices: int, microbatches: int
) -> tuple[float, list[Chosen]]:
    """The same for given times of stages: the objective, and points and choice of every stage.

    Returns:
        Infinity and no stages if there is no such cut.
    """

    def least_sum(limit: float) -> tuple[float, list[Chosen]]:
        values = np.where(candidates.secs <= limit, candidates.secs, np.inf)
        return Chains(candidates, values, num_devices).least(on_all=True)

    secs = candidates.secs
    lowest, _ = Chains(candidates, secs, num_devices, by_max=True).least(on_all=True)
    value, stages = least_of_limits(secs, lowest, microbatches - 1, least_sum)
    return value, stages or []
