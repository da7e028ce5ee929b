"""Branch parallel: branches of a block that do not wait for each other, on devices of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op, is_in
from superscaler_core.plan import Axis, Plan
from superscaler_core.plans.cuts import spread_all

EVOFORMER = "layers.*.msa_*; layers.*.outer,layers.*.tri_*,layers.*.pair_transition"
"""Alignment and pairs. They run at once if the outer product is at a block's end."""


def branch_parallel(plan: Plan, *, branches: str = EVOFORMER) -> None:
    """Put every branch of the blocks on as many devices, which share the batch.

    A microbatch sends what one branch reads of another: of an Evoformer's block the pairs one way
    and the alignment the other, and their gradients back. Memory a device: weights and activations
    of its branch.

    Args:
        plan: to fill.
        branches: of each the patterns of its modules' paths, with commas between; semicolons
            between branches. Other ops join the branch that reads them, else that they read.

    Raises:
        PlanError: the branches do not divide the devices, or one has no modules.

    Source: Wang et al., HelixFold's branch parallelism ("Parallel Evoformer"), 2022.
    """
    patterns = [
        [word.strip() for word in branch.split(",") if word.strip()]
        for branch in branches.split(";")
    ]
    num = len(plan.devices) // len(patterns)
    if num * len(patterns) != len(plan.devices):
        raise PlanError(
            f"{len(patterns)} branches on {len(plan.devices)} devices: the devices have to be a "
            f"multiple of {len(patterns)}."
        )
    branch_of = _branch_of(plan.graph, patterns)
    for branch in range(len(patterns)):
        ops = [op for op in plan.graph.ops if branch_of[op] == branch]
        devices = plan.devices[branch * num : (branch + 1) * num]
        spread_all(plan, [Axis(num, (plan.dims.batch,))], ops, devices)


def _branch_of(graph: Graph, patterns: Sequence[Sequence[str]]) -> Mapping[Op, int]:
    """The number of every op's branch."""
    found: dict[Op, int] = {}
    for op in graph.ops:
        fits = [i for i, words in enumerate(patterns) if is_in(op.module, words)]
        if fits:
            found[op] = fits[0]
    for branch, words in enumerate(patterns):
        if branch not in found.values():
            raise PlanError(
                f"{graph.name} has no modules {', '.join(words)!r}; say branches='PATTERN,...; "
                "PATTERN,...' with a semicolon between branches."
            )
    for op in reversed(graph.ops):
        readers = [reader for made in op.outputs for reader, _ in graph.readers.get(made, ())]
        _join(op, readers, found)
    for op in graph.ops:
        _join(op, [graph.producer[t] for t in op.inputs if t in graph.producer], found)
        found.setdefault(op, 0)
    return found


def _join(op: Op, others: Sequence[Op], found: dict[Op, int]) -> None:
    """Put an op that is in no branch into that of its last neighbour that is in one.

    The last reader of what blocks add to is the one that adds; those before it only look.
    """
    branch = next((found[other] for other in reversed(others) if other in found), None)
    if branch is not None:
        found.setdefault(op, branch)
