"""The section of the page about stage planners."""

from __future__ import annotations

from collections.abc import Iterator

from bench import stage_planners
from bench.pages.text import Pictures, Result, filled


def cuts(result: Result, pictures: Pictures) -> Iterator[str]:
    """The cut of every planner and model, and the planners' times."""
    yield filled("Times are seconds of a step; *best* is the least simulated step of a model.")
    yield from stage_planners.tables(result)
