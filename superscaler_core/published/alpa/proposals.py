"""Proposals of Alpa's hierarchical planner: its cut for every size of a microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import log2

from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import Candidate, Request, Scope
from superscaler_core.graph.blocks import Blocks
from superscaler_core.planners.row import PlannerRow
from superscaler_core.published.alpa.alpa_hierarchical import alpa_hierarchical, meshes_of
from superscaler_core.published.alpa.mesh_cut import MeshCut
from superscaler_core.published.alpa.ways import price_ways

SHARES = (1.0, 0.85, 0.7)
"""Shares of the memory for which cuts are made. A program also holds tensors that arrive for a
stage or wait to leave it; so if the cut for all of the memory does not fit, those for less may."""


def propose_alpa(request: Request) -> Iterator[Candidate]:
    """The stages that Alpa's planner chooses, for every size of a microbatch.

    Meshes of one axis come before those of two, because they are priced in a tenth of the time.
    Sizes near one sample per device come first: smaller microbatches leave devices nothing to
    share, and larger microbatches are too few to fill a pipeline. If a size does not fit, larger
    ones do not either, and the largest that fits is found by bisection.

    Raises:
        PlanError: no size has stages that fit in memory.
    """
    devices = request.devices
    per_host = len(devices)
    if len(request.topology.levels) > 1:
        per_host = min(per_host, len(request.topology.levels[1].groups[0]))
    seen, problem = set(), None
    for num_axes in (1, 2):
        sizes = sorted(request.samples, key=lambda each: abs(log2(each / len(devices))))
        fits = 0
        while sizes:
            samples = sizes.pop(0)
            microbatches = request.microbatches(samples)
            prices = price_ways(
                request.costs(samples), devices, meshes_of(len(devices), per_host, num_axes),
                microbatches, memory_bytes=request.memory_bytes, recycle=request.recycle,
            )  # fmt: skip
            for share in SHARES:
                limit = share * request.memory_bytes
                try:
                    cut = alpa_hierarchical(prices, devices, microbatches, limit)
                except PlanError as error:
                    problem = error
                    if share == SHARES[0]:
                        sizes = _smaller(sizes, samples, fits)
                    break
                fits = max(fits, samples)
                if (samples, cut.stages) not in seen:
                    seen.add((samples, cut.stages))
                    name = f"{samples} samples, {num_axes} axes, {100 * share:.0f} % of memory"
                    yield _candidate(f"{name}: {cut}", samples, cut)
    if problem is not None and not seen:
        raise problem


def _smaller(sizes: Sequence[int], too_large: int, fits: int) -> list[int]:
    """The sizes below one that does not fit; the middle of those that may fit comes first.

    >>> _smaller([16, 64, 8, 4, 2, 1], too_large=32, fits=0)
    [4, 16, 8, 2, 1]
    """
    unknown = sorted(each for each in sizes if fits < each < too_large)
    middle = unknown[len(unknown) // 2 :][:1]
    return middle + [each for each in sizes if each < too_large and each not in middle]


def _candidate(name: str, samples: int, cut: MeshCut) -> Candidate:
    """A candidate for a cut, first looked at with a few rounds of its pipeline and fewer blocks."""
    quick = Scope(len(cut.stages) + cut.recycle, stages=partial(_sizes, cut))
    return Candidate(name, samples, cut, guess_secs=cut.objective, quick=quick)


def _sizes(cut: MeshCut, blocks: Blocks) -> tuple[int, ...]:
    return cut.sizes


PLANNER = PlannerRow(propose_alpa, turn=20, thinks_first=True)
