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
"""Of the memory: a program also holds what arrives for a stage and what waits to leave it, so the
cuts for less memory are there in case that the one for all of it does not fit."""


def propose_alpa(request: Request) -> Iterator[Candidate]:
    """The stages that Alpa's planner chooses, for every size of a microbatch.

    Meshes of one axis, which are priced in a tenth of the time, come before those of two. Sizes
    near to a sample a device come first: smaller ones leave devices nothing to share, and of larger
    ones a pipeline has few. Where a size does not fit, larger ones do not either.
    """
    devices = request.devices
    sizes = sorted(request.samples, key=lambda each: abs(log2(each / len(devices))))
    per_host = len(devices)
    if len(request.topology.levels) > 1:
        per_host = min(per_host, len(request.topology.levels[1].groups[0]))
    seen = set()
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
                except PlanError:
                    too_large = samples if share == SHARES[0] else too_large
                    break
                if (samples, cut.stages) not in seen:
                    seen.add((samples, cut.stages))
                    name = f"{samples} samples, {num_axes} axes, {100 * share:.0f} % of memory"
                    yield _candidate(f"{name}: {cut}", samples, cut)


def _candidate(name: str, samples: int, cut: MeshCut) -> Candidate:
    """A cut, which a few rounds of its pipeline show the pace of, with fewer of the blocks."""
    look = Look(len(cut.stages) + cut.recycle, partial(_sizes, cut))
    return Candidate(name, samples, cut, guess_secs=cut.objective, look=look)


def _sizes(cut: MeshCut, blocks: Blocks) -> tuple[int, ...]:
    return cut.sizes
