"""By hand: every shipped plan, with the options that a person would try first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

from superscaler_core.evaluation.request import Candidate, Request, Trial
from superscaler_core.plan import Keep, Plan
from superscaler_core.plans import PLANS
from superscaler_core.plans.every import fill
from superscaler_core.plans.row import row_of

SAMPLES = (1, 4)
"""Samples per microbatch and replica."""

KEEPS = (Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS)
"""Levels of recomputation to try, in this order, where a plan lacks memory."""


def by_hand(request: Request) -> Iterator[Candidate]:
    """Propose every plan with a few options; where memory is short, try to recompute."""
    for name, plan in PLANS.items():
        if not row_of(plan).is_proposed:
            continue
        takes = signature(plan).parameters
        for options in _forms(request, takes):
            sides = options.get("tp", 1) * options.get("pp", 1)
            replicas = len(request.devices) // sides
            for samples in sorted({n * replicas for n in SAMPLES} & {*request.samples}):
                yield _candidate(request, name, samples, options)


def _fill(plan: Plan, *, name: str, num: int, options: Mapping[str, Any]) -> None:
    """An sProgram: a shipped plan of ``num`` microbatches, with further options by name."""
    function: Callable[..., None] = PLANS[name]
    takes = signature(function).parameters.keys() & {"microbatches"}
    fill(plan, function, {**dict.fromkeys(takes, num), **options})


def _forms(request: Request, takes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Options: one kind of parallelism for all devices, or tensor parallelism in a pipeline."""
    num = len(request.devices)
    switches = {"zero": 1} if takes.keys() & {"pp", "dp"} else {}
    switches |= {"vocabulary": True} if "vocabulary" in takes else {}
    degrees = [tp for tp in (2, min(8, num)) if num % tp == 0]
    for tp, pp in sorted({(1, 1), (1, num), *((tp, num // tp) for tp in degrees)}):
        sides = {name: side for name, side in (("tp", tp), ("pp", pp)) if name in takes}
        yield {**switches, **sides}
        if not sides:
            return


def _candidate(request: Request, name: str, samples: int, options: dict[str, Any]) -> Candidate:
    shown = " ".join(k if v is True else f"{k}={v}" for k, v in options.items())

    def follow(trial: Trial) -> Iterator[Candidate]:
        kept = options.get("keep")
        left = KEEPS[KEEPS.index(kept) + 1 :] if kept in KEEPS else KEEPS
        if trial.lacks_memory and left:
            yield _candidate(request, name, samples, {**options, "keep": left[0]})

    how = partial(_fill, name=name, num=request.microbatches(samples), options=options)
    return Candidate(f"{name} samples={samples} {shown}".strip(), samples, how, follow=follow)
