"""Why a schedule can not run: a ring of actions that wait for each other, in words."""

from __future__ import annotations

from collections.abc import Callable, Set

from superscaler_core.schedules.action import Action
from superscaler_core.schedules.dataflow import Wait, Waits
from superscaler_core.schedules.schedule import Schedule

Ring = list[tuple[Action, Wait]]
"""Actions, each with its wait for the next one; the last waits for the first."""


def explain_deadlock(schedule: Schedule, waits: Waits, ended: Set[Action]) -> str:
    """Error text: who waits for whom and why, and what would be right.

    Args:
        schedule: one that came to a halt.
        waits: of all its actions.
        ended: the actions that could run; whoever is left waits for one that is left.
    """
    # Every worker stands before one action, so following those makes a ring of at most two
    # arrows a worker: for data, and for what the maker of the data stands before.
    heads = {
        worker: next(action for action in row if action not in ended)
        for worker, row in enumerate(schedule.rows)
        if row[-1] not in ended
    }

    def blocking(action: Action) -> Wait:
        left = [wait for wait in waits[action] if wait.on not in ended]
        orders = [Wait(heads[wait.worker], wait.worker) for wait in left if wait.worker is not None]
        return (orders or left)[0]

    ring = min((_ring_from(head, blocking) for head in heads.values()), key=len)
    arrows = ", ".join(f"{action} for {wait.on} ({_reason(wait)})" for action, wait in ring)
    if any(wait.worker is not None for _, wait in ring):
        remedy = "turn round one of the orders named"
    else:
        remedy = "leave one of these edges out of the stage graph"
    return f"schedule {schedule.name} can not run, actions wait for each other: {arrows}; {remedy}."


def _ring_from(action: Action, blocking: Callable[[Action], Wait]) -> Ring:
    """The ring that is reached by going from ``action`` to what blocks it, and on from there."""
    steps: dict[Action, Wait] = {}
    while action not in steps:
        steps[action] = blocking(action)
        action = steps[action].on
    return list(steps.items())[list(steps).index(action) :]


def _reason(wait: Wait) -> str:
    return "its data" if wait.worker is None else f"worker {wait.worker} runs it first"
