"""Sequence: the order of a stage's forward, the same on every device.

Parts compute; edges and FSDP units communicate. All devices take their items from one list, so they
issue collectives in one order, and no two devices can wait for each other. The backward runs the
same list from its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from superscaler_core.errors import OrderError
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.materialize.edges import Edge, Edges
from superscaler_core.plan import Device, OpSplit, Plan, Stage
from superscaler_core.plan.op_split import MAX_PARTS, parts_of
from superscaler_core.plan.savings import FsdpUnit


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a part on its device."""

    part: Part
    device: Device

    def __str__(self) -> str:
        return f"{self.part} on {self.device}"


@dataclass(frozen=True, slots=True)
class MoveStep:
    """Move the tensor of an edge inside the stage."""

    edge: Edge

    def __str__(self) -> str:
        return f"communication of {self.edge.tensor.name}"


@dataclass(frozen=True, slots=True)
class Open:
    """Gather the weights of an FSDP unit; in the backward, reduce their gradients."""

    unit: FsdpUnit

    def __str__(self) -> str:
        return f"weights of {self.unit.ops[0].name} come"


@dataclass(frozen=True, slots=True)
class Close:
    """Drop the weights of an FSDP unit; in the backward, gather them."""

    unit: FsdpUnit

    def __str__(self) -> str:
        return f"weights of {self.unit.ops[0].name} go"


Item = Compute | MoveStep | Open | Close
Key = tuple[int, int, int | tuple[int, int]]
"""The index of an op, an order of items at one op, and an order of equal items there."""


def stage_items(plan: Plan, stage: Stage, edges: Edges) -> tuple[Item, ...]:
    """The items of a stage's forward, in one order for all devices.

    Ops run in the graph's order, unless ``op_order`` says otherwise. An edge runs as late as its
    first reader allows.

    Raises:
        OrderError: data dependencies and ``op_order`` form a cycle; the message lists the cycle.
    """
    placed = sorted(_placed(plan, stage, edges), key=itemgetter(0))
    orders = _orders_of(plan, stage)
    if not orders:
        return tuple(item for _, item in placed)
    keys, items = zip(*placed, strict=True)
    computes = {item.part: item for item in items if isinstance(item, Compute)}
    moves = {item.edge: item for item in items if isinstance(item, MoveStep)}
    # Numbers stand for items, because there may be millions of ordered pairs.
    numbers = {item: number for number, item in enumerate(items)}
    parts = {part: numbers[item] for part, item in computes.items()}
    before = _data_order(plan, edges, computes, moves, numbers)
    for first, then in orders:
        before[parts[then]].append(parts[first])
    return _sorted(items, keys, before)


def _placed(plan: Plan, stage: Stage, edges: Edges) -> Iterator[tuple[Key, Item]]:
    """The items of a stage, each with a key that says where it is without ``op_order``."""
    for op in stage.ops:
        for i, item in enumerate(_computes(op, plan.op_split(op))):
            yield (op.index, 1, i), item
    for index, waiting in moves_before(edges, stage.index).items():
        for edge in waiting:
            yield (index, 0, edge.place), MoveStep(edge)
    for i, unit in enumerate(plan.fsdp_units):
        mine = [op.index for op in unit.ops if stage.ops[0].index <= op.index]
        mine = [index for index in mine if index <= stage.ops[-1].index]
        if mine:
            yield (min(mine), -1, i), Open(unit)
            yield (max(mine), 2, i), Close(unit)


@lru_cache(maxsize=MAX_PARTS)
def _computes(op: Op, split: OpSplit) -> tuple[Compute, ...]:
    """The items of the parts of an op, which all have a device."""
    devices = (placed.device for placed in split.parts if placed.device is not None)
    return tuple(map(Compute, parts_of(op, split), devices))


def moves_before(edges: Edges, stage: int) -> Mapping[int, list[Edge]]:
    """By index of an op, the edges inside a stage that run right before it, in order.

    An edge runs before the first op that needs it, directly or through an edge that forwards it.
    """
    inside = edges.of_stage(stage)
    first = {edge: min((op.index for op, _ in edge.readers), default=1 << 60) for edge in inside}
    for edge in inside:
        parent = edge.parent
        while parent in first:
            first[parent] = min(first[parent], first[edge])
            parent = parent.parent
    found: dict[int, list[Edge]] = {}
    for edge in sorted(inside, key=lambda edge: edge.place):
        found.setdefault(first[edge], []).append(edge)
    return found


def _orders_of(plan: Plan, stage: Stage) -> list[tuple[Part, Part]]:
    """The pairs of ``op_order`` inside a stage.

    Raises:
        OrderError: an op of a later stage is ordered before one of an earlier stage.
    """
    stage_of = {op.index: other.index for other in plan.stages for op in other.ops}
    found = []
    for first, then in plan.orders:
        src, dst = stage_of[first.op.index], stage_of[then.op.index]
        if src > dst and stage.index == dst:
            raise OrderError(
                f"op_order wants {first} before {then}, but stage {src} runs after stage {dst} in "
                f"every microbatch: {first} -> {then} -> (data) -> {first}."
            )
        if src == stage.index == dst:
            found.append((first, then))
    return found


def _data_order(
    plan: Plan,
    edges: Edges,
    computes: Mapping[Part, Compute],
    moves: Mapping[Edge, MoveStep],
    numbers: Mapping[Item, int],
) -> list[list[int]]:
    """For each item, by its number, the numbers of the items that it waits for."""
    before: list[list[int]] = [[] for _ in numbers]
    parts = {part: numbers[item] for part, item in computes.items()}
    here: dict[tuple[Op, Device], list[Part]] = {}
    for part, item in computes.items():
        here.setdefault((part.op, item.device), []).append(part)
    for part, item in computes.items():
        mine = before[parts[part]]
        for position in range(len(part.op.inputs)):
            edge = edges.of_reader.get((part.op, position))
            if edge is not None and edge in moves:
                mine.append(numbers[moves[edge]])
            elif edge is None:
                mine += [parts[each] for each in _writers(plan, item, position, here)]
    for edge, move in moves.items():
        mine = before[numbers[move]]
        if edge.parent is not None:
            mine += [numbers[moves[edge.parent]]] if edge.parent in moves else []
            continue
        op = plan.graph.producer[edge.tensor]
        mine += [parts[part] for part in plan.parts(op)]
    for unit in plan.fsdp_units:
        if Open(unit) in numbers:
            opened = numbers[Open(unit)]
            inside = [parts[p] for op in unit.ops for p in plan.parts(op) if p in parts]
            for number in inside:
                before[number].append(opened)
            before[numbers[Close(unit)]] += inside
    return before


def _writers(
    plan: Plan,
    reader: Compute,
    position: int,
    here: Mapping[tuple[Op, Device], Sequence[Part]],
) -> list[Part]:
    """Parts on the same device that write an input of a part."""
    view = reader.part.inputs[position]
    op = plan.graph.producer.get(view.tensor)
    if op is None:
        return []
    output = op.outputs.index(view.tensor)
    return [
        writer
        for writer in here.get((op, reader.device), ())
        if writer.outputs[output].box.overlaps(view.box)
    ]


def _sorted(
    items: Sequence[Item], keys: Sequence[Key], before: Sequence[Sequence[int]]
) -> tuple[Item, ...]:
    """A topological order (Kahn) that follows the keys where it can."""
    after: list[list[int]] = [[] for _ in items]
    for number, first in enumerate(before):
        for other in first:
            after[other].append(number)
    left = [len(first) for first in before]
    ready = [(keys[number], number) for number, count in enumerate(left) if count == 0]
    heapq.heapify(ready)
    found: list[Item] = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(items[number])
        for other in after[number]:
            left[other] -= 1
            if left[other] == 0:
                heapq.heappush(ready, (keys[other], other))
    if len(found) < len(items):
        stuck = {number for number, count in enumerate(left) if count > 0}
        raise OrderError(_cycle_text(items, stuck, before))
    return tuple(found)


def _cycle_text(items: Sequence[Item], stuck: set[int], before: Sequence[Sequence[int]]) -> str:
    """Error text: one cycle among items that wait for each other."""
    texts = {number: str(items[number]) for number in stuck}
    number = min(stuck, key=texts.__getitem__)
    seen: dict[int, int] = {}
    path: list[int] = []
    while number not in seen:
        seen[number] = len(path)
        path.append(number)
        number = min((other for other in before[number] if other in stuck), key=texts.__getitem__)
    cycle = [*path[seen[number] :], number][::-1]
    return (
        "what runs before what forms a cycle, so nothing of it can start: "
        + " -> ".join(texts[number] for number in cycle)
        + "; take back one op_order of it."
    )
