"""Grid: a timeline as text, with one row per worker and one column per unit of time."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from math import ceil, gcd, lcm
from textwrap import wrap

from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.timeline import Span, Time, Timeline
from superscaler_core.schedules.timeline import timeline as timeline_of

IDLE, GOES_ON = "--", ".."

MAX_COLUMNS = 2000
"""Most columns with the default unit; a longer picture (of times in ns, for example) is useless."""


def grid(what: Timeline | Schedule, *, unit: Time | None = None, width: int = 100) -> str:
    """Draw a timeline, or a schedule in which every action lasts 1.

    ``F0`` is the forward of microbatch 0, and ``..`` continues it. The stage is shown, as in
    ``1F0``, if any worker holds several; ``F1&B0`` is a pair that runs at the same time.
    Columns that do not fit follow in further blocks.

    >>> from superscaler_core.schedules import one_f_one_b, timeline
    >>> print(grid(timeline(one_f_one_b(2, 2), {"F": 1, "B": 2})))
    1f1b: makespan 9, idle 1/3 of it, peak microbatches 2 1
    time      0  1  2  3  4  5  6  7  8
    worker 0 F0 F1 -- -- B0 .. -- B1 ..
    worker 1 -- F0 B0 .. F1 B1 .. -- --

    Args:
        what: the timeline or schedule.
        unit: time of one column. If None, the largest unit of which every start and end is a
            multiple, but at least 1/2000 of the makespan. A cell shows the action in the middle of
            its column, so a coarse unit hides short actions.
        width: characters per line; at least one column is drawn.

    Raises:
        ScheduleError: ``unit`` is not above 0, or the schedule cannot run.
    """
    timeline = timeline_of(what) if isinstance(what, Schedule) else what
    unit = _unit(timeline) if unit is None else unit
    if unit <= 0:
        raise ScheduleError(f"a column of the grid takes a time above 0, got unit={unit}.")
    columns = range(ceil(timeline.makespan / unit))
    several = any(len(timeline.schedule.stages_of(w)) > 1 for w in range(len(timeline.rows)))
    rows = [("time", [str(column) for column in columns])]
    for worker, row in enumerate(timeline.rows):
        moments = [unit * Fraction(2 * column + 1, 2) for column in columns]
        rows.append((f"worker {worker}", _cells(row, moments, several)))
    return "\n".join([*wrap(title(timeline, unit), width), *_lines(rows, width)])


def _unit(timeline: Timeline) -> Time:
    ends = [Fraction(span.end) for row in timeline.rows for span in row]
    denominator = lcm(*(end.denominator for end in ends))
    unit = Fraction(gcd(*(int(end * denominator) for end in ends)), denominator)
    return max(unit, Fraction(timeline.makespan) / MAX_COLUMNS)


def title(timeline: Timeline, unit: Time = 1) -> str:
    """Makespan, idle share and peaks of a timeline, in a line."""
    peaks = " ".join(map(str, timeline.peak_microbatches))
    return (
        f"{timeline.schedule.name}: makespan {timeline.makespan}, "
        f"idle {timeline.bubble_of_makespan} of it, peak microbatches {peaks}"
        + (f"; a column is {unit}" if unit != 1 else "")
    )


def _cells(row: tuple[Span, ...], moments: list[Fraction], several: bool) -> list[str]:
    """The cell of a worker at each of ``moments``, which ascend."""
    starts = [span.start for span in row]
    cells: list[str] = []
    shown: Span | None = None
    for moment in moments:
        index = bisect_right(starts, moment) - 1
        running = row[index] if index >= 0 and moment < row[index].end else None
        if running is None:
            cells.append(IDLE)
        elif running is shown:
            cells.append(GOES_ON)
        else:
            first = row[index - 1] if index and row[index - 1].start == running.start else running
            both = dict.fromkeys((first.action, running.action))
            cells.append("&".join(str(one) if several else one.brief for one in both))
        shown = running
    return cells


def _lines(rows: list[tuple[str, list[str]]], width: int) -> list[str]:
    """Labelled rows of aligned cells, in blocks of columns that fit in ``width``."""
    label_chars = max(len(label) for label, _ in rows)
    cell_chars = max(len(cell) for _, cells in rows for cell in cells)
    num_columns = len(rows[0][1])
    per_block = max(1, (width - label_chars) // (cell_chars + 1))
    lines: list[str] = []
    for first in range(0, num_columns, per_block):
        lines += [""] if first else []
        for label, cells in rows:
            texts = [cell.rjust(cell_chars) for cell in cells[first : first + per_block]]
            lines.append(" ".join([label.ljust(label_chars), *texts]))
    return lines
