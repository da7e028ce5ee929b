"""Order: which stages a worker of a setting's schedule runs, and how many microbatches it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from superscaler_core.planners.auto.setting import Setting
from superscaler_core.schedules import SCHEDULES, ActionKind, Schedule, generate, one_f_one_b
from superscaler_core.schedules.schedule import held_by

ROUNDS = 2
"""Microbatches per worker in the generated schedule; more do not increase those that are held."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a schedule makes its workers do.

    Attributes:
        stages: for each worker, its stages.
        held: for each worker, the microbatches that it holds of each of its stages, at every moment
            at which it holds most in all.
        num_stages: number of stages.
        is_split: whether gradients of weights are computed in a later action (W). All that they
            need is then kept until W, so recomputation saves nothing.
    """

    stages: tuple[tuple[int, ...], ...]
    held: tuple[frozenset[tuple[int, ...]], ...]
    num_stages: int
    is_split: bool

    @property
    def copies(self) -> float:
        """The number of workers that have a copy of each stage; 2 for Chimera."""
        return sum(map(len, self.stages)) / self.num_stages


def order_of(setting: Setting, microbatches: int) -> Order:
    """The order of a setting's schedule with so many microbatches.

    Raises:
        ScheduleError: the schedule does not take these counts.
    """
    num = min(microbatches, ROUNDS * setting.pp)
    is_hybrid = setting.family == "hybrid"
    return _order(setting.schedule if is_hybrid else "", setting.pp, num, setting.chunks)


@cache
def _order(name: str, workers: int, num: int, chunks: int) -> Order:
    generator = SCHEDULES[name] if name else one_f_one_b
    schedule = generate(generator, workers, num, chunks=chunks)
    return Order(
        tuple(schedule.stages_of(worker) for worker in range(workers)),
        tuple(_held(schedule, worker) for worker in range(workers)),
        schedule.num_stages,
        any(action.kind is ActionKind.WEIGHTS for action in schedule.places),
    )


def _held(schedule: Schedule, worker: int) -> frozenset[tuple[int, ...]]:
    counts, moments = dict.fromkeys(schedule.stages_of(worker), 0), set[tuple[int, ...]]()
    for action in schedule.rows[worker]:
        counts[action.stage] += held_by(action, runs_again=False)
        moments.add(tuple(counts.values()))
    most = max(map(sum, moments))
    return frozenset(moment for moment in moments if sum(moment) == most)
