"""Proposals: HiDup's strategies as candidates of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf, log2

from superscaler_core.evaluation.request import Candidate, Request, Trial
from superscaler_core.plan import Plan
from superscaler_core.planners.row import PlannerRow
from superscaler_core.published.hidup.prices import OurPrices
from superscaler_core.published.hidup.pricing import PricedForms
from superscaler_core.published.hidup.search import hidup

BEAM = 64
"""Strategies that are kept per cut (the position between two calls), so the search is a heuristic.
On HiDup's models its strategies take at most 2 % more than the lower bound (``least_secs``) where
links are fast, and at most 28 % more where they are slow. With slow links, a beam of eight times as
many saves up to 2 %."""

FIRST = 4
"""Samples per device of the first size, near the best sizes of models with experts or images."""

GROWTH = 4
"""Factor from a size that fits to the next one. A search takes seconds for each size."""


def propose_hidup(request: Request) -> Iterator[Candidate]:
    """HiDup's strategy for the largest microbatches that fit and whose number in a step is even.

    The search does not limit memory. Larger microbatches are no slower, because nothing overlaps
    with other microbatches. The first candidate has about ``FIRST`` samples per device. If it fits,
    the next size is ``GROWTH`` times as large. Peaks of memory are taken as ``a + b samples`` with
    ``a >= 0``: one peak excludes sizes above ``samples * memory / peak`` if it is too large, and
    two peaks give ``b``.
    """
    sizes = [size for size in request.samples if request.microbatches(size) % 2 == 0]
    if sizes:
        usual = FIRST * len(request.devices)
        yield _candidate(request, sizes, min(sizes, key=lambda size: abs(log2(size / usual))))


def _candidate(
    request: Request, sizes: Sequence[int], samples: int, before: tuple[int, int] | None = None
) -> Candidate:
    """The candidate of one size.

    Args:
        request: the model, cluster and step.
        sizes: all sizes that may be the largest one that fits, in ascending order.
        samples: one of them.
        before: another size, and its peak of memory in bytes, if one was tried.
    """

    def follow(trial: Trial) -> Iterator[Candidate]:
        peak, seen = trial.peak_bytes, before
        most = inf
        if trial.fits or trial.lacks_memory:
            slope = 0.0 if before is None else (peak - before[1]) / (samples - before[0])
            if slope > 0:
                most = samples + (request.memory_bytes - peak) / slope
            elif trial.lacks_memory:
                most = samples * request.memory_bytes / peak
            seen = samples, peak
        left = [n for n in sizes if n <= most and (n > samples if trial.fits else n < samples)]
        grown = [n for n in left if n >= GROWTH * samples] if most == inf else []
        if left:
            yield _candidate(request, left, (grown or left[-1:])[0], seen)

    how = partial(duplexed, request=request, samples=samples)
    return Candidate(f"hidup samples={samples}", samples, how, follow=follow)


def duplexed(plan: Plan, *, request: Request, samples: int) -> None:
    """An sProgram: the fastest strategy found on all devices of a request, with duplex.

    Raises:
        PlanError: a call has no signature that fits the others.
    """
    costs = request.costs_of(plan.graph)
    forms = PricedForms(OurPrices(costs, request.microbatches(samples)), request.devices)
    forms.fill(plan, hidup(forms.problem, most_calls=None, beam=BEAM))


PLANNER = PlannerRow(propose_hidup, turn=30)
