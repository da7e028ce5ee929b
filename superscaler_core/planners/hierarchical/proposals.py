"""Proposals of Alpa's hierarchical planner: its cut for every size of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf, log2

from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks
from superscaler_core.planners.hierarchical.alpa_hierarchical import alpa_hierarchical, meshes_of
from superscaler_core.planners.hierarchical.mesh_cut import MeshCut
from superscaler_core.planners.hierarchical.ways import price_ways
from superscaler_core.planners.search.request import Candidate, Look, Request

SHARES = (1.0, 0.85, 0.7)
"""Shares of the memory for which cuts are made. A program also holds tensors that arrive for a
stage or wait to leave it; so if the cut for all of the memory does not fit, those for less may."""


def propose_alpa(request: Request) -> Iterator[Candidate]:
    """The stages that Alpa's planner chooses, for every size of a microbatch.

    Meshes of one axis come before those of two, because they are priced in a tenth of the time.
    Sizes near one sample per device come first: smaller microbatches leave devices nothing to
    share, and larger microbatches are too few to fill a pipeline. If a size does not fit, larger
    ones do not either.

    Raises:
        PlanError: no size has stages that fit in memory.
    """
    devices = request.devices
    sizes = sorted(request.samples, key=lambda each: abs(log2(each / len(devices))))
    per_host = len(devices)
    if len(request.topology.levels) > 1:
        per_host = min(per_host, len(request.topology.levels[1].groups[0]))
    seen, problem = set(), None
    for num_axes in (1, 2):
        too_large = inf
        for samples in sizes:
            if samples >= too_large:
                continue
            microbatches = request.microbatches(samples)
            prices = price_ways(
                request.graph_of(samples), devices, request.topology, request.profile,
                meshes_of(len(devices), per_host, num_axes), microbatches,
                memory_bytes=request.memory_bytes, optimizer=request.optimizer,
                master_dtype=request.master_dtype, recycle=request.recycle,
            )  # fmt: skip
            for share in SHARES:
                limit = share * request.memory_bytes
                try:
                    cut = alpa_hierarchical(prices, devices, microbatches, limit)
                except PlanError as error:
                    problem = error
                    too_large = samples if share == SHARES[0] else too_large
                    break
                if (samples, cut.stages) not in seen:
                    seen.add((samples, cut.stages))
                    name = f"{samples} samples, {num_axes} axes, {100 * share:.0f} % of memory"
                    yield _candidate(f"{name}: {cut}", samples, cut)
    if problem is not None and not seen:
        raise problem


def _candidate(name: str, samples: int, cut: MeshCut) -> Candidate:
    """A candidate for a cut, first looked at with a few rounds of its pipeline and fewer blocks."""
    look = Look(len(cut.stages) + cut.recycle, stages=partial(_sizes, cut))
    return Candidate(name, samples, cut, guess_secs=cut.objective, look=look)


def _sizes(cut: MeshCut, blocks: Blocks) -> tuple[int, ...]:
    return cut.sizes
