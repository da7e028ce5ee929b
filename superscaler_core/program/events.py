"""Events: one order of all actions and transfers of a training step, which every device keeps."""

from __future__ import annotations

from superscaler_core.errors import OrderError
from superscaler_core.plan import Plan
from superscaler_core.program.edges import Edge, Edges
from superscaler_core.program.instruction import Carry, Event
from superscaler_core.schedules import Schedule, ScheduleError, one_f_one_b, timeline


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule; if it has none, one microbatch through all stages."""
    return plan.schedule or one_f_one_b(plan.num_stages, 1)


def step_events(plan: Plan, edges: Edges) -> tuple[Event, ...]:
    """All events of a step in the order in which they would end if every action took one unit.

    A transfer comes right after the action whose result it takes. As every device keeps this
    order, none waits for what can only come later.

    Raises:
        OrderError: the schedule's rows and the stages' data wait for each other.
    """
    schedule = schedule_of(plan)
    crossing = [edge for edge in edges.all if edge.crosses]
    try:
        spans = timeline(schedule, edges=edges.stage_graph).spans
    except ScheduleError as error:
        raise OrderError(f"schedule {schedule.name} on the stages of this plan: {error}") from None
    carried: dict[tuple[str, int], list[Edge]] = {}
    for edge in crossing:
        # What is recycled leads from a turn to the next, and the last turn is the forward.
        for kind in "fF" if edge.recycles is None else "f":
            carried.setdefault((kind, edge.src_stage), []).append(edge)
        if edge.backward:
            carried.setdefault(("B", edge.dst_stage), []).append(edge)
    timed: list[tuple[tuple[int, ...], Event]] = []
    for action, span in spans.items():
        start, end, mb = int(span.start), int(span.end), action.microbatch
        timed.append(((start, 1, action.stage, mb), action))
        is_back = action.kind == "B"
        for edge in carried.get((action.kind, action.stage), ()):
            timed.append(
                ((end, 0, int(is_back), edge.index, mb), Carry(edge.name, mb, is_back, edge))
            )
    return tuple(event for _, event in sorted(timed, key=lambda pair: pair[0]))
