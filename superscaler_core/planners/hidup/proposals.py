"""Proposals: HiDup's strategies as candidates of a search."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from superscaler_core.cost import CostModel
from superscaler_core.plan import Plan
from superscaler_core.planners.hidup.prices import OurPrices
from superscaler_core.planners.hidup.pricing import PricedForms
from superscaler_core.planners.hidup.search import hidup
from superscaler_core.planners.search.request import Candidate, Request, Trial

BEAM = 64
"""Strategies that are kept per cut (the position between two calls), so the search is a heuristic.
On HiDup's models its strategies take at most 2 % more than the lower bound (``least_secs``) where
links are fast, and at most 28 % more where they are slow. With slow links, a beam of eight times as
many saves up to 2 %."""


def propose_hidup(request: Request) -> Iterator[Candidate]:
    """HiDup's strategy for the largest microbatches whose number in a step is even.

    The search does not limit memory. If a candidate does not fit, the next smaller microbatches
    follow. They need less memory, and are no faster, because nothing overlaps with other
    microbatches.
    """
    sizes = [size for size in request.samples if request.microbatches(size) % 2 == 0]

    def candidates(number: int) -> Iterator[Candidate]:
        if number >= 0:
            how = partial(duplexed, request=request, samples=sizes[number])

            def follow(trial: Trial) -> Iterator[Candidate]:
                if not trial.fits:
                    yield from candidates(number - 1)

            yield Candidate(f"hidup samples={sizes[number]}", sizes[number], how, follow=follow)

    return candidates(len(sizes) - 1)


def duplexed(plan: Plan, *, request: Request, samples: int) -> None:
    """An sProgram: the fastest strategy found on all devices of a request, with duplex.

    Raises:
        PlanError: a call has no signature that fits the others.
    """
    costs = CostModel(
        plan.graph, request.profile, request.topology,
        optimizer=request.optimizer, master_dtype=request.master_dtype,
    )  # fmt: skip
    forms = PricedForms(OurPrices(costs, request.microbatches(samples)), request.devices)
    forms.fill(plan, hidup(forms.problem, most_calls=None, beam=BEAM))
