"""Inner runs: the ops of blocks between the linear maps that make and sum inner features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.graph.modules import Modules
from superscaler_core.plan import Plan

ChosenBlocks = Sequence[int] | Modules | None
"""Blocks by their numbers, or by modules in them; None is all."""


def inner_runs(
    plan: Plan, num: int, blocks: ChosenBlocks
) -> Iterator[tuple[DimClass, list[Op], Sequence[Op]]]:
    """The runs of ops with inner features that are to be cut, each with its dim and its block.

    Args:
        plan: the plan with the blocks.
        num: parts per device; 1 cuts nothing.
        blocks: numbers or modules of the blocks; all if None.

    Raises:
        PlanError: there is no such block, or ``num`` is less than 1.
    """
    if num < 1:
        raise PlanError(f"{num} parts on a device: it takes 1 or more.")
    for block in chosen_blocks(plan, blocks) if num > 1 else ():
        for dim in plan.blocks.inner:
            run = [op for op in block if plan.dims.ids(op, dim)]
            if run:
                yield dim, run, block


def chosen_blocks(plan: Plan, chosen: ChosenBlocks) -> list[tuple[Op, ...]]:
    """Blocks by their numbers or modules; all if nothing is said.

    Raises:
        PlanError: there is no such block.
    """
    every = plan.blocks.all
    if isinstance(chosen, Modules):
        found = [ops for ops in every if any(op in chosen for op in ops)]
        if not found:
            raise PlanError(f"blocks={chosen}: none of the {len(every)} blocks has such modules.")
        return found
    numbers = range(len(every)) if chosen is None else chosen
    wrong = [number for number in numbers if not 0 <= number < len(every)]
    if wrong:
        raise PlanError(
            f"blocks={tuple(numbers)} of {len(every)}: {wrong[0]} should be a number from 0 to "
            f"{len(every) - 1}."
        )
    return [every[number] for number in numbers]


def with_norm(plan: Plan, run: Sequence[Op], block: Sequence[Op]) -> list[Op]:
    """A run, with the ops of its block whose results only the run reads, such as its norm."""
    inside = set(run)
    for op in reversed(block):
        readers = {reader for out in op.outputs for reader, _ in plan.graph.readers.get(out, ())}
        if readers and readers <= inside:
            inside.add(op)
    return [op for op in block if op in inside]
