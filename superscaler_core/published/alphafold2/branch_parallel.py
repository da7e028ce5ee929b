"""Branch parallel: independent branches of a block run on different devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.modules import Modules
from superscaler_core.plan import Plan
from superscaler_core.plans import plan_row
from superscaler_core.plans.option_texts import modules, words
from superscaler_core.plans.pieces.along import along
from superscaler_core.plans.row import OptionReader

EVOFORMER = (
    Modules("layers.*.msa_*"),
    Modules("layers.*.outer", "layers.*.tri_*", "layers.*.pair_transition"),
)
"""Alignment and pairs; they are independent if the outer product is at a block's end."""


def branches_of(text: str) -> tuple[Modules, ...]:
    """Patterns of several branches, separated by semicolons."""
    return tuple(map(modules, words(text, ";")))


@plan_row(
    readers={
        "branches": OptionReader(
            branches_of, "patterns of modules with commas between; semicolons between branches"
        )
    }
)
def branch_parallel(plan: Plan, *, branches: Sequence[Modules] = EVOFORMER) -> None:
    """Put every branch of the blocks on its own group of devices; a group shares the batch.

    A microbatch sends the tensors that one branch reads from another: in an Evoformer's block the
    pairs one way and the alignment the other, and their gradients back. Memory per device: weights
    and activations of its branch.

    Args:
        plan: to fill.
        branches: the modules of each branch. An op outside of them joins the branch that reads it,
            or else the branch that it reads.

    Raises:
        PlanError: the branches do not divide the devices, or one has no modules.

    Source: Wang et al., HelixFold's branch parallelism ("Parallel Evoformer"), 2022.
    """
    num = len(plan.devices) // len(branches)
    if num * len(branches) != len(plan.devices):
        raise PlanError(
            f"{len(branches)} branches on {len(plan.devices)} devices: the devices have to be a "
            f"multiple of {len(branches)}."
        )
    branch_of = _branch_of(plan.graph, branches)
    for op in plan.graph.ops:
        plan.op_trans(op, along(plan, op, num, plan.dims.batch))
        plan.op_assign(op, plan.devices[branch_of[op] * num :][:num])


def _branch_of(graph: Graph, branches: Sequence[Modules]) -> Mapping[Op, int]:
    """The number of every op's branch."""
    found: dict[Op, int] = {}
    for number, branch in enumerate(branches):
        ops = branch.ops(graph)
        if not ops:
            raise PlanError(
                f"{graph.name} has no modules {branch}; say branches=(Modules('PATTERN', ...), "
                "...), the modules of each branch."
            )
        found = dict.fromkeys(ops, number) | found
    readers = {
        op: [reader for made in op.outputs for reader, _ in graph.readers.get(made, ())]
        for op in graph.ops
    }
    for op in reversed(graph.ops):
        _join(op, readers[op], found)
    for op in graph.ops:
        _join(op, [graph.producer[t] for t in op.inputs if t in graph.producer], found)
    # Ops that depend on inputs alone join their readers, which may have joined a branch just now.
    for op in reversed(graph.ops):
        _join(op, readers[op], found)
        found.setdefault(op, 0)
    return found


def _join(op: Op, others: Sequence[Op], found: dict[Op, int]) -> None:
    """Put an op outside all branches into the branch of its last neighbour that has one.

    The last reader of the residual stream is the op that adds to it; earlier readers only read.
    """
    branch = next((found[other] for other in reversed(others) if other in found), None)
    if branch is not None:
        found.setdefault(op, branch)
