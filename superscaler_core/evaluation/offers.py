"""Offers: rewrites that are tried on the plans of every planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from superscaler_core.evaluation.request import (
    Candidate,
    Request,
    SearchPlanner,
    Trial,
    nothing_more,
)
from superscaler_core.plan import Overlap, Plan

OVERLAPS = {
    "overlap moves": Overlap(prefetch=1, reductions=True, moves=True),
    "overlap": Overlap(prefetch=1, reductions=True),
}
"""Overlap of communication with computing, by the words that are added to the plan's name.

The offer that hides most is tried first.
"""


def _overlapped(plan: Plan, *, by: Callable[..., None], offer: Overlap, **given: int) -> None:
    """An sProgram: the plan that ``by`` fills, with its overlap and that of an offer combined."""
    by(plan, **given)
    now = plan.overlap
    plan.overlap = replace(
        now,
        prefetch=max(now.prefetch, offer.prefetch),
        reductions=now.reductions or offer.reductions,
        moves=now.moves or offer.moves,
    )


def with_overlap(planner: SearchPlanner) -> SearchPlanner:
    """A planner that proposes the plans of ``planner``, and those that fit again with overlap."""

    def offered(candidate: Candidate) -> Candidate:
        def follow(trial: Trial) -> Iterator[Candidate]:
            yield from map(offered, candidate.follow(trial))
            for word, overlap in OVERLAPS.items() if trial.fits else ():
                how = partial(_overlapped, by=candidate.sprogram, offer=overlap)
                name = f"{candidate.name} {word}"
                yield replace(
                    candidate, name=name, sprogram=how, guess_secs=trial.secs, follow=nothing_more
                )

        return replace(candidate, follow=follow)

    def propose(request: Request) -> Iterator[Candidate]:
        return map(offered, planner(request))

    return propose
