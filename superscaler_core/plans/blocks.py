"""Blocks: the ops of a model by its repeated layers, and stages made of them."""

from __future__ import annotations

from itertools import accumulate, pairwise

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op, is_in
from superscaler_core.plan import Plan, Stage

BLOCK = "layers.*"
"""Path of the modules that are one block each, in all models of ``superscaler_core.models``."""


def block_starts(graph: Graph, block: str = BLOCK) -> tuple[Op, ...]:
    """The first op of every block.

    Raises:
        PlanError: no module fits the pattern; the message names modules that there are.
    """
    depth = block.count(".") + 1
    found: dict[str, Op] = {}
    for op in graph.ops:
        if is_in(op.module, [block]):
            found.setdefault(".".join(op.module.split(".")[:depth]), op)
    if not found:
        modules = ", ".join(dict.fromkeys(op.module for op in graph.ops if op.module))
        raise PlanError(
            f"{graph.name} has no block {block!r}; its modules are {modules[:200]}: say "
            "block=... with a wildcard for the number of the block."
        )
    return tuple(found.values())


def blocks_of(graph: Graph, block: str = BLOCK) -> tuple[tuple[Op, ...], ...]:
    """The ops of every block; those between two blocks are in the first of them.

    Raises:
        PlanError: no module fits the pattern.
    """
    starts = [op.index for op in block_starts(graph, block)]
    last = max(op.index for op in graph.ops if is_in(op.module, [block]))
    return tuple(graph.ops[a:b] for a, b in pairwise([*starts, last + 1]))


def block_groups(graph: Graph, block: str = BLOCK) -> tuple[tuple[Op, ...], ...]:
    """All ops in groups: those before the blocks, every block, those after them.

    Raises:
        PlanError: no module fits the pattern.
    """
    blocks = blocks_of(graph, block)
    before, after = graph.ops[: blocks[0][0].index], graph.ops[blocks[-1][-1].index + 1 :]
    return tuple(group for group in (before, *blocks, after) if group)


def stages_of_blocks(
    plan: Plan, num: int, *, block: str = BLOCK, sizes: str = ""
) -> tuple[Stage, ...]:
    """Cut a plan into stages of as many blocks, or nearly; what is around them joins the ends.

    Args:
        plan: to cut.
        num: stages.
        block: pattern of the blocks' module paths.
        sizes: blocks of every stage, such as ``"3,2"``; even if empty.

    Raises:
        PlanError: there are fewer blocks than stages, or ``sizes`` does not add up to them.
    """
    starts = block_starts(plan.graph, block)
    if len(starts) < num:
        raise PlanError(
            f"{num} stages of the {len(starts)} blocks {block!r} of {plan.graph.name}: a stage "
            f"has a block at least; use at most {len(starts)} stages, or a model of more blocks."
        )
    cuts = _cuts(len(starts), num, sizes)
    return plan.pipeline([starts[cut] for cut in cuts])


def _cuts(num_blocks: int, num: int, sizes: str) -> list[int]:
    """The first blocks of all stages but the first."""
    even = [num_blocks * (i + 1) // num - num_blocks * i // num for i in range(num)]
    counts = even
    if sizes:
        counts = [int(word) if word.strip().isdecimal() else 0 for word in sizes.split(",")]
    if len(counts) != num or sum(counts) != num_blocks or min(counts) < 1:
        raise PlanError(
            f"sizes={sizes!r} of {num} stages: give {num} counts of at least 1 that add up to the "
            f"{num_blocks} blocks, such as {','.join(map(str, even))!r}."
        )
    return list(accumulate(counts))[:-1]
