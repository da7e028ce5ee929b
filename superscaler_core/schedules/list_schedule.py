"""List scheduling: the worker that can start next runs the most urgent action that it can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.timeline import Durations, Time, duration_of

_URGENCY = {ActionKind.INPUTS: 0, ActionKind.FORWARD: 1, ActionKind.WEIGHTS: 2}
"""Earlier stages wait for an I, later ones for an F, and nobody for a W."""


def list_schedule(
    name: str, places: Sequence[int], num_microbatches: int, durations: Durations, limit: int
) -> Schedule | None:
    """A schedule in halves of a chain of stages, in the order in which actions can start.

    Of actions that can start at the same time on a worker, an I comes before an F, and an F before
    a W; then the later forward and the earlier backward. It is a heuristic.

    Args:
        name: name of the schedule.
        places: the worker of every stage.
        num_microbatches: N.
        durations: times of F, I and W.
        limit: the most microbatches of a stage whose activations a worker holds at a time.

    Returns:
        The schedule; None if the limit stops all workers, as it may where a worker has several
        stages.
    """
    last = len(places) - 1
    ends: dict[Action, Time] = {}
    free: list[Time] = [0] * (max(places) + 1)
    held = [0] * len(free)
    rows: list[list[Action]] = [[] for _ in free]
    counts = dict.fromkeys(product(_URGENCY, range(len(places))), 0)

    def start(action: Action) -> Time | None:
        """When an action can start; None as long as something that it needs has not run."""
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case ActionKind.FORWARD:
                if held[places[stage]] == limit:
                    return None
                needs = [Action(ActionKind.FORWARD, stage - 1, microbatch)] if stage else []
            case ActionKind.INPUTS:
                later = Action(ActionKind.INPUTS, stage + 1, microbatch)
                needs = [Action(ActionKind.FORWARD, stage, microbatch)]
                needs += [later] if stage < last else []
            case _:
                needs = [Action(ActionKind.INPUTS, stage, microbatch)]
        if any(need not in ends for need in needs):
            return None
        return max([free[places[stage]], *(ends[need] for need in needs)])

    for _ in range(3 * len(places) * num_microbatches):
        nexts = [Action(k, s, n) for (k, s), n in counts.items() if n < num_microbatches]
        ready = [(at, _rank(a), a) for a in nexts if (at := start(a)) is not None]
        if not ready:
            return None
        at, _, action = min(ready)
        worker = places[action.stage]
        ends[action] = free[worker] = at + duration_of(action.kind, action.stage, durations)
        held[worker] += {ActionKind.FORWARD: 1, ActionKind.WEIGHTS: -1}.get(action.kind, 0)
        counts[action.kind, action.stage] += 1
        rows[worker].append(action)
    return Schedule(name, len(places), num_microbatches, tuple(map(tuple, rows)))


def _rank(action: Action) -> tuple[int, int]:
    later_first = action.kind is ActionKind.FORWARD
    return _URGENCY[action.kind], -action.stage if later_first else action.stage
