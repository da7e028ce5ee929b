"""Order: what a setting's schedule makes its workers do, and the time of its step.

The step is the simulator's where devices of a worker act as one, on the same ``BusyPorts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

from superscaler_core.cost.comm_cost import CommCost
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    generate,
    nf1b,
    timeline,
)
from superscaler_core.schedules.schedule import held_by
from superscaler_core.simulator.busy_ports import BusyPorts

ROUNDS = 4
"""Periods of microbatches that show how a pipeline goes on; two more per further chunk.

With 3, the steps of pipelines of uneven stages were up to 5 % too fast (Wide-ResNet, mBART).
"""


def rounds_of(setting: Setting) -> int:
    """Periods of ``pp`` microbatches after which a setting's pipeline repeats its pattern."""
    return ROUNDS + 2 * (setting.chunks - 1)


Key = tuple[int, int, bool, int]
"""What arrives at an action: its stage, its microbatch, whether it goes back, and its turn."""


class WorkerRoute(NamedTuple):
    """A transfer of a stage's results from worker to worker, or of their gradients back."""

    stage: int
    src: int
    dst: int
    is_back: bool


@dataclass(frozen=True, slots=True)
class Send:
    """A transfer of one microbatch: where it goes, and what arrives."""

    route: WorkerRoute
    key: Key


@dataclass(frozen=True, slots=True)
class Run:
    """An action of a worker, by its kind and stage, and what it waits for, if anything."""

    what: tuple[ActionKind, int]
    worker: int
    key: Key | None


Event = Run | Send


@dataclass(frozen=True, eq=False)
class Order:
    """What a schedule makes its workers do."""

    schedule: Schedule

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The actions, and the transfers between stages, in the order of a step."""
        return events_of(self.schedule)

    @cached_property
    def routes(self) -> frozenset[WorkerRoute]:
        """The transfers between stages, without microbatches."""
        return frozenset(event.route for event in self.events if isinstance(event, Send))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """For each worker, its stages."""
        return tuple(map(self.schedule.stages_of, range(self.schedule.num_workers)))

    @cached_property
    def held(self) -> tuple[frozenset[tuple[int, ...]], ...]:
        """For each worker, its microbatches of each of its stages, when it holds most in all."""
        return tuple(map(self._held, range(self.schedule.num_workers)))

    @cached_property
    def is_split(self) -> bool:
        """Whether gradients of weights are computed in a later action (W).

        All that they need is then kept until W, so recomputation saves nothing.
        """
        return any(action.kind is ActionKind.WEIGHTS for action in self.schedule.places)

    @property
    def copies(self) -> int:
        """The number of workers that have a copy of each stage; 2 for Chimera."""
        return sum(map(len, self.stages)) // self.schedule.num_stages

    def _held(self, worker: int) -> frozenset[tuple[int, ...]]:
        counts, moments = dict.fromkeys(self.stages[worker], 0), set[tuple[int, ...]]()
        for action in self.schedule.rows[worker]:
            if action.kind is not ActionKind.RECOMPUTE:
                counts[action.stage] += held_by(action, runs_again=False)
            moments.add(tuple(counts.values()))
        most = max(map(sum, moments))
        return frozenset(moment for moment in moments if sum(moment) == most)


def orders_of(setting: Setting, microbatches: int, recycle: int = 0) -> tuple[Order, ...]:
    """The order of a setting's schedule: of all microbatches, or of two smaller numbers of them.

    Two that differ by a period of a pipeline, if a step has more microbatches than show how it
    goes on. A ScheduleError is raised for counts that the schedule does not take.
    """
    name = setting.schedule if setting.family == "hybrid" else "1f1b"
    most = rounds_of(setting) * setting.pp
    nums = (most, most - setting.pp) if most < microbatches else (microbatches,)
    chunks, apart = setting.chunks, setting.apart
    return tuple(_order(name, setting.pp, num, chunks, apart, recycle) for num in nums)


@cache
def _order(name: str, workers: int, num: int, chunks: int, apart: bool, recycle: int) -> Order:
    generator = partial(nf1b, recycle=recycle) if recycle else SCHEDULES[name]
    return Order(generate(generator, workers, num, chunks=chunks, apart=apart))


# --- time ---------------------------------------------------------------------------------------


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

    ``durations`` has the ticks of an action by its kind and stage, ``comm_costs`` the calls of a
    transfer.
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
