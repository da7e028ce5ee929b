"""Tables: lines of cells as text, for a terminal or a document; the first line is the head."""

from __future__ import annotations

import re
from collections.abc import Sequence

Lines = Sequence[Sequence[str]]


def grid(lines: Lines) -> str:
    """The lines as text in aligned columns; columns with numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    columns = [*zip(widths, _are_numbers(lines), strict=True)]
    texts = []
    for line in lines:
        cells = (
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, (width, is_number) in zip(line, columns, strict=True)
        )
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def markdown(lines: Lines) -> str:
    """The lines as a Markdown table; columns with numbers are right-aligned."""
    head, *body = lines
    rules = ["---:" if is_number else "---" for is_number in _are_numbers(lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *body))


def _are_numbers(lines: Lines) -> list[bool]:
    """For every column, whether it has a number below the head."""
    head, *body = lines
    columns = zip(*body, strict=True) if body else [()] * len(head)
    return [any(map(_is_number, column)) for column in columns]


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, possibly with a unit; the name 3F1B is not."""
    return re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?( ?x|%)?", cell) is not None
