"""Spans: the items of a stage, with communication, that are rerun before their backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superscaler_core.errors import PlanError
from superscaler_core.plan import Plan
from superscaler_core.program.sequence import Close, Compute, Item, Open


def spans_of(plan: Plan, items: Sequence[Item]) -> Mapping[Item, int]:
    """For each item of a stage that is rerun, the number of its span, from 1.

    A span reaches from the first op of its group to the last op whose backward needs its forward
    values, and contains all items in between, so that all devices repeat the same communication.
    The span of a transformer block ends before its last residual sum and the all-reduce before it.
    Weights that are gathered in a span are dropped in it.

    Raises:
        PlanError: two groups overlap, or a part is swapped too.
    """
    if not plan.runs_again:
        return {}
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for place, item in enumerate(items):
        if isinstance(item, Compute) and (number := plan.rerun_group(item.part.op)):
            begins.setdefault(number, place)
            if item.part.op.saves:
                ends[number] = place
    found: dict[Item, int] = {}
    windows = _windows(items)
    # Numbered by position, so that equal plans have equal texts, whatever the order of calls.
    for number, group in enumerate(sorted(ends, key=begins.__getitem__), 1):
        first, last = _with_windows(begins[group], ends[group], windows)
        for item in items[first : last + 1]:
            if item in found:
                raise PlanError(
                    f"rerun of two groups that both have {item} between their ops; groups have to "
                    "be one behind the other, such as blocks."
                )
            if isinstance(item, Compute) and plan.swap_group(item.part):
                raise PlanError(
                    f"rerun and swap of {item.part}: no value of it is kept, so none can wait on "
                    "the host; use one of them."
                )
            found[item] = number
    return found


def _windows(items: Sequence[Item]) -> list[tuple[int, int]]:
    """The positions at which windows that gather weights open and close."""
    opened = {i.window: place for place, i in enumerate(items) if isinstance(i, Open)}
    closed = {i.window: place for place, i in enumerate(items) if isinstance(i, Close)}
    return [(place, closed[window]) for window, place in opened.items() if window.gathers]


def _with_windows(first: int, last: int, windows: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Extend a span so that it does not cut a window."""
    inside = range(first, last + 1)
    cut = [ends for ends in windows if (ends[0] in inside) != (ends[1] in inside)]
    if not cut:
        return first, last
    ends = [first, last, *(end for window in cut for end in window)]
    return _with_windows(min(ends), max(ends), windows)
