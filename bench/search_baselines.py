"""Baselines of searches: the systems of the studies as planners, tuned over their own knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.studies.systems import System, Way
from bench.studies.tuning import MICROBATCHES
from superscaler_core.plan import Plan
from superscaler_core.planners.search.request import (
    Candidate,
    Look,
    Request,
    SearchPlanner,
    Trial,
)

FEW = 4
"""Microbatches for every device that are simulated first."""


@dataclass(frozen=True)
class Filled:
    """A system's sProgram with the knobs of one way."""

    sprogram: Callable[..., None]
    way: Way
    num: int

    def __call__(self, plan: Plan, microbatches: int = 0) -> None:
        self.sprogram(plan, microbatches=microbatches or self.num, **self.way.knobs)


def tuned_system(system: System) -> SearchPlanner:
    """Every way of a system: the first rung of its ladders that fits, then larger microbatches."""

    def propose(request: Request) -> Iterator[Candidate]:
        ways = sorted(system.ways(len(request.devices)), key=lambda way: way.is_last_resort)
        for number, way in enumerate(ways):
            yield from candidates(request, way, 0, 0, 0, float(number + 1))

    def candidates(
        request: Request, way: Way, size: int, place: int, rung: int, order: float
    ) -> Iterator[Candidate]:
        """The candidate of one size of microbatches on one rung."""
        samples = MICROBATCHES[size] * way.dp
        if request.batch % samples:
            return
        chosen = way.with_knobs(way.ladders[place][rung])
        num = request.microbatches(samples)
        few = FEW * len(request.devices)

        def follow(trial: Trial) -> Iterator[Candidate]:
            if trial.fits and size + 1 < len(MICROBATCHES):
                yield from candidates(request, way, size + 1, place, rung, order)
            elif not trial.fits:
                rungs = len(way.ladders[place])
                after = (place, rung + 1) if rung + 1 < rungs else (place + 1, 0)
                if after[0] < len(way.ladders):
                    yield from candidates(request, way, size, *after, order)

        yield Candidate(
            f"{system.name}: {chosen} samples={samples}",
            samples,
            Filled(system.sprogram, chosen, num),
            guess_secs=order * 1e-9,
            look=Look(few),
            follow=follow,
        )

    return propose
