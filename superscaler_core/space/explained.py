"""Explained: what each cut of an op would cost in a plan, whichever planner made the plan."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.cost import CostModel
from superscaler_core.plan import OpSplit, Plan
from superscaler_core.space.choices import Choice, MeshSizes, choices_of
from superscaler_core.space.groups import OpGroup, groups_of
from superscaler_core.space.priced import price_space


def explain_op(
    plan: Plan,
    name: str,
    costs: CostModel,
    *,
    microbatches: int = 1,
    memory_bytes: float | None = None,
) -> str:
    """A table of the choices of an op; all other ops are cut as in the plan.

    The choices are those of ``price_space`` for the op's stage, on the mesh of the stage's devices
    that reproduces most of the plan's cuts. The plan may cut a group in a way that is not a choice,
    such as into parts that one device runs one after another. Then the choice that cuts most of its
    ops alike stands for it; a note says so for the op's own group. Recomputation and weights in
    pieces are ignored.

    Raises:
        PlanError: the model has no such op, or parts of its stage have no device.
    """
    op = plan.op(name)
    ops = next(stage.ops for stage in plan.stages if op in stage.ops)
    devices = sorted({device for each in ops for device in plan.op_split(each).devices})
    runs = ([each for each in run if each in {*ops}] for run in plan.blocks.groups)
    groups = [group for run in runs for group in groups_of(plan.graph, run)]

    def shared(mesh: MeshSizes) -> int:
        """How many ops can be cut on this mesh as the plan cuts them."""
        choices = (choices_of(plan.dims, group, devices, mesh) for group in groups)
        return sum(
            max(_shared(plan, group, each) for each in own)
            for group, own in zip(groups, choices, strict=True)
        )

    num = len(devices)
    meshes = [(num,), *((a, num // a) for a in range(2, num) if num % a == 0)]
    mesh = max(meshes, key=shared)
    priced = price_space(
        costs, devices, mesh=mesh, ops=ops, blocks=plan.blocks,
        microbatches=microbatches, memory_bytes=memory_bytes,
    )  # fmt: skip
    node = priced.node_of[name]
    assignment = [
        _nearest(plan, next((g for g in own if op in g), own[0]), choices)
        for own, choices in zip(priced.groups, priced.choices, strict=True)
    ]
    group = next(g for g in priced.groups[node] if op in g)
    text = priced.explain(assignment, name)
    if _shared(plan, group, priced.choices[node][assignment[node]]) < len(group):
        text += "\nThe plan cuts it in a way that is none of these; the nearest one is marked."
    return text


def _nearest(plan: Plan, group: OpGroup, choices: Sequence[Choice]) -> int:
    """The number of the choice that cuts most ops as the plan does."""
    return max(range(len(choices)), key=lambda i: _shared(plan, group, choices[i]))


def _shared(plan: Plan, group: OpGroup, choice: Choice) -> int:
    """How many ops of a group a choice cuts as the plan does."""
    splits = choice.split_of(group)
    return sum(_work(plan.op_split(op)) == _work(split) for op, split in splits.items())


def _work(split: OpSplit) -> frozenset[object]:
    """The pieces that every device computes, however the parts are numbered."""
    return frozenset((part.device, part.pieces) for part in split.parts)
