"""Proposals of Alpa's hierarchical planner: its cut for every size of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import log2

from superscaler_core.errors import PlanError
from superscaler_core.planners.hierarchical.alpa_hierarchical import alpa_hierarchical, meshes_of
from superscaler_core.planners.hierarchical.ways import price_ways
from superscaler_core.planners.search.request import Candidate, Request

SHARES = (1.0, 0.85, 0.7)
"""Of the memory: a program also holds what arrives for a stage and what waits to leave it, so the
cuts for less memory are there in case that the one for all of it does not fit."""


def propose_alpa(request: Request) -> Iterator[Candidate]:
    """The stages that Alpa's planner chooses, for every size of a microbatch.

    Meshes of one axis, which are priced in a tenth of the time, come before those of two. Sizes
    near to a sample a device come first: smaller ones leave devices nothing to share, and of larger
    ones a pipeline has few.
    """
    devices = request.devices
    sizes = sorted(request.samples, key=lambda each: abs(log2(each / len(devices))))
    per_host = len(devices)
    if len(request.topology.levels) > 1:
        per_host = min(per_host, len(request.topology.levels[1].groups[0]))
    seen = set()
    for num_axes, samples in product((1, 2), sizes):
        microbatches = request.microbatches(samples)
        prices = price_ways(
            request.graph_of(samples), devices, request.topology, request.profile,
            meshes_of(len(devices), per_host, num_axes), microbatches,
            memory_bytes=request.memory_bytes, optimizer=request.optimizer,
            master_dtype=request.master_dtype,
        )  # fmt: skip
        for share in SHARES:
            limit = share * request.memory_bytes
            try:
                cut = alpa_hierarchical(prices, devices, microbatches, limit)
            except PlanError:
                break
            if (samples, cut.stages) not in seen:
                seen.add((samples, cut.stages))
                name = f"{samples} samples, {num_axes} axes, {100 * share:.0f} % of memory: {cut}"
                yield Candidate(name, samples, cut, guess_secs=cut.objective)
