"""Stages of blocks: a pipeline whose stages begin with blocks, or with layers if none repeat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from superscaler_core.errors import PlanError
from superscaler_core.plan import Plan, Stage


def stages_of_blocks(plan: Plan, num: int, sizes: Sequence[int] = ()) -> tuple[Stage, ...]:
    """Cut a plan into stages of nearly equally many blocks; ops around them join the ends.

    Args:
        plan: to cut.
        num: stages.
        sizes: blocks of every stage, such as ``(3, 2)``; even if empty.

    Raises:
        PlanError: there are fewer blocks than stages, or ``sizes`` does not add up to them.
    """
    count = len(plan.blocks.layers)
    if count < num:
        raise PlanError(
            f"{num} stages of the {count} blocks of {plan.graph.name}: a stage has a block at "
            f"least; use at most {count} stages, or a model of more blocks."
        )
    even = tuple(count * (i + 1) // num - count * i // num for i in range(num))
    counts = tuple(sizes) or even
    if len(counts) != num or sum(counts) != count or min(counts) < 1:
        raise PlanError(
            f"sizes={counts} of {num} stages: give {num} counts of at least 1 that add up to the "
            f"{count} blocks, such as {even}."
        )
    return plan.pipeline([plan.blocks.layers[i][0] for i in list(accumulate(counts))[:-1]])
