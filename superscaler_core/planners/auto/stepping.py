"""Stepping: a pipeline's step in time, from the times of its stages and of what moves between them.

It is the simulator's step with one action per run of a stage: devices of a worker act as one, and
the tensors between stages share links by the same ``BusyPorts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from superscaler_core.cost.comm_cost import CommCost
from superscaler_core.schedules import Action, ActionKind, Schedule, timeline
from superscaler_core.simulator.ports import BusyPorts

Key = tuple[int, int, bool, int]
"""What arrives at an action: its stage, its microbatch, whether it goes back, and its turn."""


class WorkerRoute(NamedTuple):
    """A transfer of a stage's results to the next stage, or of their gradients back.

    Attributes:
        stage: the stage whose results or their gradients move.
        src, dst: the workers that send and receive.
        is_back: whether these are the gradients.
    """

    stage: int
    src: int
    dst: int
    is_back: bool


@dataclass(frozen=True, slots=True)
class Send:
    """A transfer of one microbatch.

    Attributes:
        route: where it goes.
        key: what arrives.
    """

    route: WorkerRoute
    key: Key


@dataclass(frozen=True, slots=True)
class Run:
    """An action of a worker.

    Attributes:
        what: kind and stage of the action.
        worker: its worker.
        key: what it waits for; None if it waits for no other action.
    """

    what: tuple[ActionKind, int]
    worker: int
    key: Key | None


Event = Run | Send


def events_of(schedule: Schedule) -> tuple[Event, ...]:
    """The events of a step in a program's order (``program.events``), for a chain of stages."""
    timed: list[tuple[tuple[int, ...], Event]] = []
    for action, span in timeline(schedule).spans.items():
        stage, microbatch, kind = action.stage, action.microbatch, action.kind
        (worker,) = schedule.places[action]
        is_alone = kind in (ActionKind.RECOMPUTE, ActionKind.WEIGHTS)
        key = None if is_alone else (stage, microbatch, kind.goes_back, action.recycling_pass)
        timed.append(((int(span.start), 1, stage, microbatch), Run((kind, stage), worker, key)))
        then = stage - 1 if kind.goes_back else stage + 1
        if is_alone or not 0 <= then < schedule.num_stages:
            continue
        (there,) = schedule.places[_at(schedule, action, then)]
        arrives = then, microbatch, kind.goes_back, action.recycling_pass
        send = Send(WorkerRoute(min(stage, then), worker, there, kind.goes_back), arrives)
        order = int(span.end), 0, int(kind.goes_back), min(stage, then), microbatch
        timed.append((order, send))
    return tuple(event for _, event in sorted(timed, key=lambda pair: pair[0]))


def _at(schedule: Schedule, action: Action, stage: int) -> Action:
    """The same action at another stage, where a backward may be split."""
    kinds = (ActionKind.BACKWARD, ActionKind.INPUTS) if action.kind.goes_back else (action.kind,)
    same = (Action(kind, stage, action.microbatch, action.recycling_pass) for kind in kinds)
    return next(each for each in same if each in schedule.places)


def makespan(
    events: Sequence[Event],
    num_workers: int,
    durations: Mapping[tuple[ActionKind, int], int],
    comm_costs: Mapping[WorkerRoute, Sequence[CommCost]],
) -> int:
    """Ticks from the start of a step to its last action.

    Args:
        events: the events in order.
        num_workers: number of workers.
        durations: ticks of an action, by its kind and stage.
        comm_costs: the calls of a transfer.
    """
    clock, arrived, ports = [0] * num_workers, dict[Key, int](), BusyPorts()
    for event in events:
        if isinstance(event, Run):
            start = clock[event.worker]
            if event.key is not None:
                start = max(start, arrived.get(event.key, 0))
            clock[event.worker] = start + durations[event.what]
        else:
            start = end = max(clock[event.route.src], clock[event.route.dst])
            for comm in comm_costs[event.route]:
                end = max(end, ports.reserve(start, comm.ticks, comm.ports))
            arrived[event.key] = end
    return max(clock)
