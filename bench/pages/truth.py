"""Sections of the page of steps that others measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.pages.text import Pictures, Result, Section
from bench.tables import Lines, markdown
from bench.truth import tables


def _table(lines_of: Callable[[Result], Lines]) -> Section:
    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        yield markdown(lines_of(result))

    return section


SECTIONS = {
    "rows": ("truth", _table(lambda result: tables.errors(result["found"]))),
    "published": ("truth", _table(lambda result: tables.published(result["published"]))),
    "scaling": ("truth-scaling", _table(lambda result: tables.scaled(result["rows"]))),
    "readings": ("truth-readings", _table(lambda result: tables.errors(result["found"]))),
}
"""The parts of the page, each with the name of its result."""
