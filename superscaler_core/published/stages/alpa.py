"""Alpa's inter-op planner: stages on submeshes, by the time of a step.

Objective: with B microbatches, and stages that take t_i seconds per microbatch and together use all
devices,

    sum of t_i + (B - 1) max of t_i

For every limit on the slowest stage, F(s, k, d) is the least sum of s stages from layer k to the
end on d devices:

    F(s, k, d) = min over i and submeshes of t(k, i, submesh) + F(s - 1, i + 1, d - size)

The more stages follow a stage, the more microbatches it keeps. A stage is left out if it has no
memory for as many as s - 1 stages behind it require.

Complexity: ``O(K**2 D N S)`` for a limit, with K layers, D devices, N sizes of submeshes and S
numbers of stages that memory tells apart. About logarithmically many limits are tried if few are
near the best one (``limits``), and at most the ``K**2 N`` different times of stages.

Differences from the published code (``stage_construction.py``): its search over limits goes upward
in steps of at least 1e-6 s and stops where ``B * limit`` is above the best; ours is exact to a
relative 1e-9. A stage uses its submesh with the fastest of the problem's degrees that fits; there,
the result of the intra-op planner says how.

Source: Zheng et al., Alpa, OSDI 2022, section 5.
"""

from __future__ import annotations

import numpy as np

from superscaler_core.published.stages.candidates import Candidates
from superscaler_core.published.stages.chains import Chains, Chosen
from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.limits import least_of_limits
from superscaler_core.published.stages.points import prefixes
from superscaler_core.published.stages.problem import StageProblem


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
    """As ``alpa``, for given times of stages: the objective in seconds, and every stage.

    Returns:
        Infinity and no stages if there is no cut.
    """

    def least_sum(limit: float) -> tuple[float, list[Chosen]]:
        values = np.where(candidates.secs <= limit, candidates.secs, np.inf)
        return Chains(candidates, values, num_devices).least(on_all=True)

    secs = candidates.secs
    lowest, _ = Chains(candidates, secs, num_devices, by_max=True).least(on_all=True)
    value, stages = least_of_limits(secs, lowest, microbatches - 1, least_sum)
    return value, stages or []
