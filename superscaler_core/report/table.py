"""Tables as text: columns as wide as needed, and lines of limited width."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

GAP = "  "
NO_BREAK = "\xa0"
"""A space at which a cell is not broken."""

LEAST = 6
"""Least number of characters in a column."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 100) -> str:
    """Rows under a header; numbers are right-aligned, and long texts continue in further lines.

    >>> print(table(["edge", "bytes"], [["e0", "64"], ["e1: out -> in", "1024"]], width=16))
    edge     bytes
    e0          64
    e1: out   1024
    -> in

    Args:
        header: names of the columns.
        rows: the cells of each row.
        width: characters per line, at least ``LEAST`` for every column.
    """
    texts = list(zip(header, *rows, strict=True))
    right = [bool(rows) and all(map(_is_number, cells)) for _, *cells in texts]
    columns = [
        [cell.replace(" ", NO_BREAK) for cell in column] if is_right else list(column)
        for column, is_right in zip(texts, right, strict=True)
    ]
    limits = _limits(columns, width)
    wrapped = [[_wrapped(c, w) for c in column] for column, w in zip(columns, limits, strict=True)]
    widths = [max(len(line) for cell in column for line in cell) for column in wrapped]
    lines: list[str] = []
    for cells in zip(*wrapped, strict=True):
        for i in range(max(map(len, cells))):
            shown = (cell[i] if i < len(cell) else "" for cell in cells)
            padded = (
                text.rjust(w) if is_right else text.ljust(w)
                for text, w, is_right in zip(shown, widths, right, strict=True)
            )
            lines.append(GAP.join(padded).rstrip().replace(NO_BREAK, " "))
    return "\n".join(lines)


def _wrapped(cell: str, width: int) -> list[str]:
    return wrap(cell, width, break_on_hyphens=False) or [""]


def _limits(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Column widths that fit: the widest columns are narrowed first, and broken between words."""
    widths = [max(map(len, column)) for column in columns]
    words = [max(len(word) for cell in column for word in cell.split(" ")) for column in columns]
    for least in (words, [LEAST] * len(words)):
        while sum(widths) + len(GAP) * (len(widths) - 1) > width:
            room = [w if w > low else 0 for w, low in zip(widths, least, strict=True)]
            if not any(room):
                break
            widths[room.index(max(room))] -= 1
    return widths


def _is_number(cell: str) -> bool:
    """Whether a cell is a count or an amount, such as ``1.5 MiB``."""
    return cell[:1].isdigit() or cell in ("", "inf")


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers as ranges.

    >>> numbers_text([0, 1, 2, 3, 6]), numbers_text([4, 5])
    ('0-3,6', '4,5')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = (f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    return ",".join(texts)
