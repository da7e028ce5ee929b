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
"""Strategies of a cut that are kept, so the search is a heuristic. On HiDup's models its strategies
take at most 2 % more than the lower bound (``least_secs``) where links are fast, and at most 28 %
more where they are slow; there, eight times as many strategies of a cut save up to 2 %."""


def propose_hidup(request: Request) -> Iterator[Candidate]:
    """HiDup's strategy for the largest microbatches of which two are halves of one.

    The search knows no limit of memory. Where that is short, the next smaller microbatches follow:
    they need less, and nothing overlaps with other microbatches, so they are no faster.
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
    """An sProgram: the strategy of the least time on all devices of a request, with duplex.

    Raises:
        PlanError: a call has no signature that fits the others.
    """
    costs = CostModel(
        plan.graph, request.profile, request.topology,
        optimizer=request.optimizer, master_dtype=request.master_dtype,
    )  # fmt: skip
    forms = PricedForms(OurPrices(costs, request.microbatches(samples)), request.devices)
    forms.fill(plan, hidup(forms.problem, most_calls=None, beam=BEAM))
