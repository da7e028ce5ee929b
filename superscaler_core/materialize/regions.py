"""Regions: the items of a stage, with communication, that are recomputed before their backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superscaler_core.errors import PlanError
from superscaler_core.materialize.sequence import Close, Compute, Item, Open
from superscaler_core.plan import Plan


def regions_of(plan: Plan, items: Sequence[Item]) -> Mapping[Item, int]:
    """For each item of a stage that is recomputed, the number of its region, from 1.

    A region reaches from the first op of its group to the last op whose backward needs its forward
    values, and contains all items in between, so that all devices repeat the same communication.
    The region of a transformer block ends before its last residual sum and the all-reduce before
    it. Weights that are gathered in a region are dropped in it.

    Raises:
        PlanError: two groups overlap, or a part is offloaded too.
    """
    if not plan.runs_again:
        return {}
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for place, item in enumerate(items):
        if isinstance(item, Compute) and (number := plan.region_group(item.part.op)):
            begins.setdefault(number, place)
            if item.part.op.saves:
                ends[number] = place
    found: dict[Item, int] = {}
    units = _units(items)
    # Numbered by position, so that equal plans have equal texts, whatever the order of calls.
    for number, group in enumerate(sorted(ends, key=begins.__getitem__), 1):
        first, last = _with_units(begins[group], ends[group], units)
        for item in items[first : last + 1]:
            if item in found:
                raise PlanError(
                    f"recompute_regions of two groups that both have {item} between their ops; "
                    "groups have to be one behind the other, such as blocks."
                )
            if isinstance(item, Compute) and plan.offload_group(item.part):
                raise PlanError(
                    f"recompute_regions and offload of {item.part}: no value of it is kept, so "
                    "none can wait on the host; use one of them."
                )
            found[item] = number
    return found


def _units(items: Sequence[Item]) -> list[tuple[int, int]]:
    """The positions at which FSDP units that gather weights open and close."""
    opened = {i.unit: place for place, i in enumerate(items) if isinstance(i, Open)}
    closed = {i.unit: place for place, i in enumerate(items) if isinstance(i, Close)}
    return [(place, closed[unit]) for unit, place in opened.items() if unit.unshards]


def _with_units(first: int, last: int, units: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Extend a region so that it does not cut an FSDP unit."""
    inside = range(first, last + 1)
    cut = [ends for ends in units if (ends[0] in inside) != (ends[1] in inside)]
    if not cut:
        return first, last
    ends = [first, last, *(end for unit in cut for end in unit)]
    return _with_units(min(ends), max(ends), units)
