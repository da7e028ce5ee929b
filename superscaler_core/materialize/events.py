"""Events: one order of all actions and transfers of a training step, kept by every device."""

from __future__ import annotations

from typing import Any

from superscaler_core.errors import OrderError
from superscaler_core.materialize.edges import Edge, Edges
from superscaler_core.materialize.routes import home, on_its_route
from superscaler_core.plan import Plan
from superscaler_core.program.event import Event, P2PSend
from superscaler_core.schedules import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    one_f_one_b,
    timeline,
)
from superscaler_core.schedules.timeline import EQUAL, Durations

_FORWARDS = (ActionKind.RECYCLE, ActionKind.FORWARD)
"""All that a stage runs if the loss has no gradient."""


PAIRED: Durations = {"F&B": 2, "F&I": 2}
"""Times of pairs whose actions begin and end together."""


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule; if it has none, one microbatch through all stages."""
    return plan.schedule or one_f_one_b(plan.num_stages, 1)


def step_events(plan: Plan, edges: Edges, *, pairs_are_one: bool = False) -> tuple[Event, ...]:
    """All events of a step, in the order in which they would end if every action took one unit.

    A transfer follows directly after the action that computes its tensor. All devices keep this
    one order, so no device waits for a later event.

    Args:
        plan: the decisions.
        edges: the edges of the plan.
        pairs_are_one: whether the two actions of a pair begin and end together.

    Raises:
        OrderError: the schedule's rows and the data dependencies between stages form a cycle, or
            the schedule has a separate recomputation (R) for only some microbatches of a stage.
    """
    schedule = schedule_of(plan)
    _check_recomputations(schedule)
    crossing = [edge for edge in edges.all if edge.crosses]
    try:
        durations: Durations = {**EQUAL, **PAIRED} if pairs_are_one else EQUAL
        spans = timeline(schedule, durations, stage_graph(plan, edges)).spans
    except ScheduleError as error:
        raise OrderError(f"schedule {schedule.name} on the stages of this plan: {error}") from None
    sent: dict[tuple[ActionKind, int], list[Edge]] = {}
    for edge in crossing:
        for kind in _kinds_before(edge):
            sent.setdefault((kind, edge.src_stage), []).append(edge)
        for kind in (ActionKind.BACKWARD, ActionKind.INPUTS) if edge.backward else ():
            sent.setdefault((kind, edge.dst_stage), []).append(edge)
    timed: list[tuple[tuple[Any, ...], Event]] = []
    for scheduled, span in spans.items():
        if scheduled.kind not in _FORWARDS and not plan.graph.loss.requires_grad:
            continue
        action = on_its_route(plan, scheduled)
        start, end, mb = int(span.start), int(span.end), action.microbatch
        timed.append(((start, 1, action.stage, mb), action))
        is_back = action.kind.goes_back
        for edge in sent.get((action.kind, action.stage), ()):
            timed.append(((end, 0, int(is_back), edge.place, mb), P2PSend(edge.name, mb, is_back)))
    return tuple(event for _, event in sorted(timed, key=lambda pair: pair[0]))


def _kinds_before(edge: Edge) -> tuple[ActionKind, ...]:
    """The runs of its stage after which an edge sends."""
    if edge.result:
        return (ActionKind.FORWARD,)
    # A recycled value goes from one pass to the next, and the last pass is the forward.
    return _FORWARDS if edge.recycles is None else (ActionKind.RECYCLE,)


def stage_graph(plan: Plan, edges: Edges) -> tuple[tuple[int, int], ...]:
    """Pairs of the schedule's stages (src, dst): dst reads a result of src in the same pass."""
    return tuple(sorted({(home(plan, src), home(plan, dst)) for src, dst in edges.stage_graph}))


def _check_recomputations(schedule: Schedule) -> None:
    """Check that a stage has an R for all microbatches or for none, as they share one block."""
    for stage in range(schedule.num_stages):
        microbatches = range(schedule.num_microbatches)
        apart = [
            m for m in microbatches if Action(ActionKind.RECOMPUTE, stage, m) in schedule.places
        ]
        if apart and len(apart) < schedule.num_microbatches:
            raise OrderError(
                f"schedule {schedule.name} has an R for microbatches {apart} of stage {stage} and "
                f"none for others; of a stage all {schedule.num_microbatches} have one, or none."
            )
