"""Order: which stages a worker of a setting's schedule runs, and how many microbatches it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, partial

from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.stepping import Event, Send, WorkerRoute, events_of
from superscaler_core.schedules import (
    SCHEDULES,
    ActionKind,
    Schedule,
    generate,
    nf1b,
    one_f_one_b,
)
from superscaler_core.schedules.schedule import held_by

ROUNDS = 4
"""Periods of microbatches that show how a pipeline goes on; two more per further chunk.

With 3, the steps of pipelines of uneven stages were up to 5 % too fast (Wide-ResNet, mBART).
"""


def rounds_of(setting: Setting) -> int:
    """Periods of ``pp`` microbatches after which a setting's pipeline repeats its pattern."""
    return ROUNDS + 2 * (setting.chunks - 1)


@dataclass(frozen=True, eq=False)
class Order:
    """What a schedule makes its workers do.

    Attributes:
        schedule: the schedule.
        num_microbatches: number of its microbatches.
    """

    schedule: Schedule
    num_microbatches: int

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

    def workers_of(self, stage: int) -> tuple[int, ...]:
        """The workers that have a copy of a stage."""
        return tuple(worker for worker, mine in enumerate(self.stages) if stage in mine)

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
    goes on.

    Raises:
        ScheduleError: the schedule does not take these counts.
    """
    name = setting.schedule if setting.family == "hybrid" else ""
    most = rounds_of(setting) * setting.pp
    nums = (most, most - setting.pp) if most < microbatches else (microbatches,)
    apart = setting.apart
    return tuple(_order(name, setting.pp, num, setting.chunks, apart, recycle) for num in nums)


@cache
def _order(name: str, workers: int, num: int, chunks: int, apart: bool, recycle: int) -> Order:
    generator = SCHEDULES[name] if name else one_f_one_b
    if recycle:
        generator = partial(nf1b, recycle=recycle)
    return Order(generate(generator, workers, num, chunks=chunks, apart=apart), num)
