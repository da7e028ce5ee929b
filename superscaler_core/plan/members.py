"""Members: checks that a decision of a plan is about ops of its graph, or parts of these ops."""

from __future__ import annotations

from collections.abc import Iterable

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part


def check_member(graph: Graph, asked: str, what: object) -> None:
    """Check that an argument of a plan's method is an op of the plan's graph, or a part of one.

    Args:
        graph: the plan's graph.
        asked: the method that was called, for the message.
        what: the argument.

    Raises:
        PlanError: the argument is something else, or belongs to another graph.
    """
    op = what.op if isinstance(what, Part) else what
    if not isinstance(op, Op):
        raise PlanError(
            f"{asked} of {what!r}: it is no op; give ops of {graph.name}, such as "
            "plan.graph.ops[0] or those in plan.graph.ops_in('layers.0')."
        )
    num = len(graph.ops)
    own = graph.ops[op.index] if op.index < num else graph.updates.get(op.outputs[0].name)
    if own is not op:
        raise PlanError(
            f"{asked} of {op.name}: it is an op of another graph than the plan's {graph.name}; "
            "a capture makes new ops, so take them from plan.graph."
        )


def members(graph: Graph, asked: str, group: Iterable[Op | Part]) -> tuple[Op | Part, ...]:
    """A group of ops or parts.

    Raises:
        PlanError: the argument is no group, or has a member that ``check_member`` refuses.
    """
    if isinstance(group, str | Op | Part) or not isinstance(group, Iterable):
        raise PlanError(
            f"{asked} of {group!r}: give groups, each a list of ops of {graph.name}, such as "
            f"{asked}(plan.graph.ops_in('layers.0'), plan.graph.ops_in('layers.1'))."
        )
    found = tuple(group)
    for what in found:
        check_member(graph, asked, what)
    return found
