"""Deadlock: explains why a schedule cannot run, by a cycle of actions that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Set

from superscaler_core.schedules.action import Action
from superscaler_core.schedules.dataflow import Wait, Waits
from superscaler_core.schedules.schedule import Schedule

Ring = list[tuple[Action, Wait]]
"""Actions, each with its wait for the next one; the last waits for the first."""


def explain_deadlock(schedule: Schedule, waits: Waits, ended: Set[Action]) -> str:
    """The text of an error: which actions wait for each other, why, and how to fix it.

    All actions wait for actions that cannot run, except for those that have ended.
    """
    # Every worker is stuck at one action. Following these gives a cycle with at most two waits per
    # worker: one for data, and one for the action at which the source of the data is stuck.
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
    """The cycle reached from ``action`` by following what blocks each action."""
    steps: dict[Action, Wait] = {}
    while action not in steps:
        steps[action] = blocking(action)
        action = steps[action].on
    return list(steps.items())[list(steps).index(action) :]


def _reason(wait: Wait) -> str:
    return "its data" if wait.worker is None else f"worker {wait.worker} runs it first"
