"""One worker: a schedule's actions on a single worker, to compare a pipeline with one device."""

from __future__ import annotations

from dataclasses import replace

from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.timeline import timeline


def on_one_worker(schedule: Schedule) -> Schedule:
    """The same actions on one worker, in the order in which they start if each takes one unit.

    Of the actions that start together, those of lower stages come first. All actions read the same
    versions of weights as before, so the trained weights are the same.

    >>> from superscaler_core.schedules import SCHEDULES
    >>> print(on_one_worker(SCHEDULES["1f1b"](2, 2)))
    1f1b stages=2 microbatches=2
    worker 0: 0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1
    """
    spans = sorted(
        timeline(schedule).spans.values(),
        key=lambda span: (span.start, span.action.stage, span.action.microbatch),
    )
    return replace(schedule, rows=(tuple(span.action for span in spans),))
