"""What a table of plans knows of an sProgram besides its function: set by a decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Fill = TypeVar("Fill", bound=Callable[..., None])


@dataclass(frozen=True)
class OptionReader:
    """How an option is read from a text such as a command line.

    Attributes:
        parse: from the text to the value; raises ``KeyError`` or ``ValueError`` for other texts.
        expected: the form of the text, with an example; or a table of which it names a row.
    """

    parse: Callable[[str], Any]
    expected: str | Mapping[str, Any]

    @property
    def form(self) -> str:
        """The form in words."""
        if isinstance(self.expected, str):
            return self.expected
        return f"one of {', '.join(self.expected)}"

    @classmethod
    def named(cls, table: Mapping[str, Any]) -> OptionReader:
        """Reads the name of a row of a table."""
        return cls(table.__getitem__, table)


@dataclass(frozen=True)
class PlanRow:
    """What is known of an sProgram.

    Attributes:
        readers: readers of options whose values are not numbers, by name.
        is_proposed: whether the planner ``by_hand`` proposes it. Not those whose training differs
            from that of one device, nor those whose cuts a planner computes.
    """

    readers: Mapping[str, OptionReader] = field(default_factory=dict)
    is_proposed: bool = True


_ROW = "__plan_row__"


def plan_row(
    *, readers: Mapping[str, OptionReader] | None = None, is_proposed: bool = True
) -> Callable[[Fill], Fill]:
    """Decorate an sProgram with what a table should know of it; arguments as in ``PlanRow``."""

    def decorate(fill: Fill) -> Fill:
        object.__setattr__(fill, _ROW, PlanRow(readers or {}, is_proposed))
        return fill

    return decorate


def row_of(fill: Callable[..., None]) -> PlanRow:
    """What is known of an sProgram."""
    row: PlanRow = getattr(fill, _ROW, PlanRow())
    return row
