"""Piper: stages of a graph, with data and tensor parallel degrees, under a memory limit.

Objective: the load of the most loaded stage, in seconds per microbatch. The load of a set of layers
with degrees d x t is

    compute(d, t) + 2 (entering + leaving bytes) / (d bandwidth)
                  + 4 (d - 1) w / (d t microbatches bandwidth)

where w is the size of its weights in bytes. Both directions of a transfer count, and gradients are
synchronized once per step. A stage is the difference of two downsets (sets of layers that contain
all layers that they read), so a model need not be a chain.

Complexity: ``O(P**2 D G S)`` for P downsets, D devices, G degrees and S numbers of stages that
memory tells apart. P is K + 1 for a chain of K layers, and exponential in the width of a graph.

Differences from the published code (``algo.cpp``): there, replicas take whole microbatches in turn,
so the state has the sum of the data parallel degrees of the stages from here to the end; here,
replicas share every microbatch, so the number of stages says how many microbatches are kept. Layers
of a stage have no ways of their own, such as recomputation. A result that several layers of a stage
read enters the stage once; there, once for every edge.

Source: Tarnawski, Narayanan, Phanishayee, Piper, NeurIPS 2021.
"""

from __future__ import annotations

import numpy as np

from superscaler_core.published.stages.candidates import Candidates
from superscaler_core.published.stages.chains import Chains
from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.points import downsets
from superscaler_core.published.stages.problem import StageProblem

SYNC_FACTOR = 4
"""As in PipeDream: a gradient and a new value are sent and received."""


def piper(problem: StageProblem) -> StageCut:
    """Cut a graph of layers into stages so that the largest load of a stage is least.

    Raises:
        PlanError: no cut fits in memory, or the graph has too many downsets.
    """
    candidates = Candidates.of(problem, downsets(problem))
    entering, leaving = candidates.crossing_bytes(problem)
    bandwidth = problem.bytes_per_sec(problem.num_devices)
    data, tensor = (
        np.array([getattr(each, name) for each in problem.degrees], dtype=float)
        for name in ("data", "tensor")
    )
    moved = 2 * (entering + leaving)[:, :, None] / data
    synced = SYNC_FACTOR * (data - 1) / (data * tensor * problem.microbatches)
    load = (moved + candidates.weight_bytes(problem)[:, :, None] * synced) / bandwidth
    value, stages = Chains(
        candidates, candidates.secs + load, problem.num_devices, by_max=True
    ).least()
    if not stages:
        raise problem.no_cut("Piper")
    return problem.placed(
        [(candidates.layers(p, q), problem.degrees[c]) for p, q, c in stages], value
    )
