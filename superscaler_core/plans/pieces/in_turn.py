"""In turn: parts of a run of ops on one device, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.plan import Device, Plan


def turns_of(plan: Plan, run: Sequence[Op], num: int) -> list[list[Part]]:
    """The turns of a run: turn i has every ``num``-th part of each op, from part i on."""
    return [[part for op in run for part in plan.parts(op)[i::num]] for i in range(num)]


def in_turn(plan: Plan, turns: Sequence[Sequence[Part]]) -> Iterator[tuple[Part, Part]]:
    """Pairs of parts to order, so that every device ends one turn before it begins the next."""
    run = list(dict.fromkeys(part.op for part in turns[0]))
    inside = {tensor for op in run for tensor in op.outputs}
    read = {tensor for op in run for tensor in op.inputs}
    firsts = [op for op in run if not inside.intersection(op.inputs)]
    lasts = [op for op in run if not read.intersection(op.outputs)]
    for (turn, then), last, first in product(pairwise(turns), lasts, firsts):
        ends, begins = ([p for p in turn if p.op is last], [p for p in then if p.op is first])
        yield from ((a, b) for a, b in product(ends, begins) if plan.device(a) == plan.device(b))


def places(plan: Plan, op: Op, num: int) -> list[Device]:
    """The devices of an op's parts, in order, each ``num`` times."""
    found = [plan.device(part) for part in plan.parts(op)]
    assert None not in found, f"{op.name} has no device yet"
    return [device for device in found if device is not None for _ in range(num)]
