"""Dataflow: what an action waits for: the data that it reads, and the order of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.schedule import Schedule

Edges = Iterable[tuple[int, int]]
"""Stage graph: pairs ``(src, dst)``, where stage dst reads a result of stage src."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A reason why an action cannot start yet: ``on`` has to end first.

    The order of ``worker`` requires this; None if ``on`` computes data for the action.
    """

    on: Action
    worker: int | None = None


Waits = dict[Action, list[Wait]]
"""For every action of a schedule, all its waits."""


def waits_of(schedule: Schedule, edges: Edges | None = None) -> Waits:
    """Everything that each action of ``schedule`` waits for; without edges, stages are a chain.

    A forward reads the forwards of the stages before it. A backward, or its half for inputs, reads
    its own forward (and recomputation, if there is one) and the same kind of action of the stages
    after it. The half for weights reads the half for inputs; a recomputation reads only its
    forward. Forwards without gradient form a chain: the first stages start a pass with the
    results of the last stages in the previous pass, and the forward of training is the last pass.

    Raises:
        ScheduleError: an edge names a stage that the schedule does not have.
    """
    graph = _StageGraph(schedule, edges)
    waits = {action: [Wait(on) for on in graph.reads(action)] for action in schedule.places}
    for worker, row in enumerate(schedule.rows):
        for earlier, later in pairwise(row):
            waits[later].append(Wait(earlier, worker))
    return waits


class _StageGraph:
    """The stage graph of a schedule: which actions read the results of which other actions."""

    def __init__(self, schedule: Schedule, edges: Edges | None) -> None:
        num_stages = schedule.num_stages
        self._srcs: list[list[int]] = [[] for _ in range(num_stages)]
        self._dsts: list[list[int]] = [[] for _ in range(num_stages)]
        for src, dst in sorted(set(pairwise(range(num_stages)) if edges is None else edges)):
            if not (0 <= src < num_stages and 0 <= dst < num_stages):
                raise ScheduleError(
                    f"edge {src} -> {dst}: schedule {schedule.name} has stages 0 to "
                    f"{num_stages - 1}."
                )
            self._srcs[dst].append(src)
            self._dsts[src].append(dst)
        self._sinks = [stage for stage, dsts in enumerate(self._dsts) if not dsts]
        self._places = schedule.places
        self._num_passes = [0] * schedule.num_microbatches
        for action in schedule.places:
            if action.kind is ActionKind.RECYCLE:
                passes = self._num_passes[action.microbatch]
                self._num_passes[action.microbatch] = max(passes, action.recycling_pass + 1)

    def reads(self, action: Action) -> Sequence[Action]:
        """The actions whose results ``action`` reads."""
        stage, microbatch = action.stage, action.microbatch
        kind = action.kind
        if kind is ActionKind.WEIGHTS:
            return [Action(ActionKind.INPUTS, stage, microbatch)]
        if kind is ActionKind.UPDATE:
            return []  # its worker runs it after the gradients that it applies
        forward = Action(ActionKind.FORWARD, stage, microbatch)
        if kind is ActionKind.RECOMPUTE:
            return [forward]
        if kind.goes_back:
            again = Action(ActionKind.RECOMPUTE, stage, microbatch)
            behind = [self._back(dst, microbatch) for dst in self._dsts[stage]]
            return [again if again in self._places else forward, *behind]
        if self._srcs[stage]:
            return [
                Action(kind, src, microbatch, action.recycling_pass) for src in self._srcs[stage]
            ]
        number = (
            self._num_passes[microbatch] if kind is ActionKind.FORWARD else action.recycling_pass
        )
        return [
            Action(ActionKind.RECYCLE, sink, microbatch, number - 1)
            for sink in self._sinks
            if number
        ]

    def _back(self, stage: int, microbatch: int) -> Action:
        """The action that computes the gradients of a stage's inputs."""
        whole = Action(ActionKind.BACKWARD, stage, microbatch)
        return whole if whole in self._places else Action(ActionKind.INPUTS, stage, microbatch)
