"""Look-up stages: a pipeline whose look-ups in an embedding are stages of their own."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Plan, Stage


def lookup_stages(plan: Plan, tp: int) -> tuple[list[Op], list[Stage]]:
    """Make every look-up a stage, and the blocks behind it as many stages as it has groups.

    Ops before the first look-up belong to its stage.

    Args:
        plan: to cut.
        tp: devices of a group, which has one stage of blocks.

    Returns:
        The look-ups, and the stages of blocks.

    Raises:
        PlanError: the groups are no multiple of the look-ups, or a look-up has fewer blocks behind
            it than groups, or no look-up is in front of blocks.
    """
    name, num = plan.blocks.embedding.name, len(plan.devices)
    starts = [ops[0].index for ops in plan.blocks.all]
    lookups = [op for op in plan.blocks.lookups if op.index < starts[-1]]
    if not lookups:
        raise PlanError(
            f"{plan.graph.name} has no op before its last block that reads {name!r}; say "
            "find_blocks(graph, embedding='NAME'), the parameter in which words are looked up."
        )
    if tp < 1 or num % (tp * len(lookups)):
        raise PlanError(
            f"tp={tp} on {num} devices: tp is at least 1, and behind each of {len(lookups)} "
            f"look-ups in {name!r} are as many groups of tp devices, so the devices have to be a "
            f"multiple of {len(lookups)} * tp."
        )
    per_lookup = num // tp // len(lookups)
    ends = [*(op.index for op in lookups[1:]), len(plan.graph.ops)]
    points: list[int] = []
    for lookup, end in zip(lookups, ends, strict=True):
        inside = [index for index in starts if lookup.index < index < end]
        if len(inside) < per_lookup:
            raise PlanError(
                f"{per_lookup} stages of the {len(inside)} blocks behind {lookup.name}: a stage "
                "has a block at least; use fewer devices, a larger tp, or more blocks."
            )
        rest = [inside[len(inside) * i // per_lookup] for i in range(1, per_lookup)]
        points += [lookup.index, lookup.index + 1, *rest]
    stages = plan.pipeline(points[1:])
    return lookups, [stage for stage in stages if stage.index % (per_lookup + 1)]
