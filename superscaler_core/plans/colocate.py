"""Colocate: an op's parts on one device, one after another; what co-shard adds to any plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise, product

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.op_trans import split
from superscaler_core.plans import cuts
from superscaler_core.plans.blocks import BLOCK, blocks_of

Turn = dict[Op, dict[Device, list[Part]]]
"""What runs at a time of a run of ops: of each op, the parts by device."""


def colocate(
    plan: Plan, num: int, *, blocks: str = "", block: str = BLOCK, features: str = ""
) -> Collection[int]:
    """Cut the inner features of blocks further, into ``num`` parts where they are.

    On every device the parts of an attention run one after another, and those of an MLP, each from
    the first linear map to the last; what they make adds up. Of an attention or MLP what enters its
    norm alone is kept. Its backward makes the norm again, and each part when it comes to it: so
    inner activations of one part are there at a time.

    To be called when all ops have their devices. Nothing more is sent than without it.

    Args:
        plan: to go on with.
        num: parts on a device.
        blocks: numbers of the blocks, such as ``"0-3,8"``; all if empty.
        block: pattern of the blocks' module paths.
        features: what is cut, as ``cuts.inner`` takes it.

    Returns:
        The numbers of the blocks that are cut.

    Raises:
        PlanError: features cannot be cut alike into so many parts, or there is no such block.
    """
    if num < 1:
        raise PlanError(f"{num} parts on a device: it takes 1 or more.")
    if num == 1:
        return ()
    every = blocks_of(plan.graph, block)
    numbers = _numbers(blocks, len(every))
    for number in numbers:
        for dim in cuts.inner(plan, features):
            run = [op for op in every[number] if plan.dims.ids(op, dim)]
            turns = _cut(plan, run, dim, num)
            _in_turn(plan, run, turns)
            plan.recompute(*(_all_parts(turn) for turn in turns))
            plan.rerun(_with_norm(plan, run, every[number]))
    return numbers


def _numbers(blocks: str, count: int) -> list[int]:
    """The blocks that a text such as ``"0-3,8"`` names."""
    found: set[int] = set()
    for word in filter(None, blocks.split(",")):
        first, _, last = word.partition("-")
        ends = [int(n) if n.strip().isdecimal() else count for n in (first, last or first)]
        if not ends[0] <= ends[1] < count:
            raise PlanError(
                f"blocks={blocks!r} of {count}: {word.strip()!r} should be a number from 0 to "
                f"{count - 1}, or two such as '0-{count - 1}'."
            )
        found.update(range(ends[0], ends[1] + 1))
    return sorted(found) or list(range(count))


def _cut(plan: Plan, run: Sequence[Op], dim: DimClass, num: int) -> list[Turn]:
    """Cut ops along a dim on every device; what comes first, second, ... there."""
    loops = {op: plan.dims.ids(op, dim)[0] for op in run}
    pieces = [len({part.range(loops[op]) for part in plan.parts(op)}) for op in run]
    if run:
        sizes = {op.sizes[loop]: op for op, loop in loops.items()}
        cuts.check_cut(plan.graph.name, dim, num * max(pieces), sizes)
    turns: list[Turn] = [{} for _ in range(num)]
    for op, loop in loops.items():
        devices = [plan.device(part) for part in plan.parts(op)]
        parts = plan.op_trans(op, split(loop, num))
        for i, part in enumerate(parts):
            device = devices[i // num]
            assert device is not None, f"{part.op.name} has no device yet"
            plan.op_assign(part, device)
            turns[i % num].setdefault(op, {}).setdefault(device, []).append(part)
    return turns


def _in_turn(plan: Plan, run: Sequence[Op], turns: Sequence[Turn]) -> None:
    """Let every device end one turn before it begins the next."""
    inside = {tensor for op in run for tensor in op.outputs}
    read = {tensor for op in run for tensor in op.inputs}
    firsts = [op for op in run if not inside.intersection(op.inputs)]
    lasts = [op for op in run if not read.intersection(op.outputs)]
    for turn, then in pairwise(turns):
        for last, first in product(lasts, firsts):
            for device, parts in turn[last].items():
                for pair in product(parts, then[first].get(device, ())):
                    plan.op_order(*pair)


def _with_norm(plan: Plan, run: Sequence[Op], block: Sequence[Op]) -> list[Op]:
    """A run of ops, and those of its block that feed nothing but it, such as its norm."""
    inside = set(run)
    for op in reversed(block):
        readers = {reader for out in op.outputs for reader, _ in plan.graph.readers.get(out, ())}
        if readers and readers <= inside:
            inside.add(op)
    return [op for op in block if op in inside]


def _all_parts(turn: Turn) -> list[Part]:
    return [part for parts in turn.values() for here in parts.values() for part in here]
