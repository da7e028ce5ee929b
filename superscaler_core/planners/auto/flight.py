"""Flight: what the order of a pipeline makes a device hold, from the schedule itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from superscaler_core.planners.auto.setting import Setting
from superscaler_core.schedules import SCHEDULES, ActionKind, ScheduleError, generate

ROUNDS = 2
"""Microbatches for every worker, at which the most are in flight."""

MAX_WORKERS = 8
"""Longer pipelines hold nearly the same shares, and their schedules are long."""


@dataclass(frozen=True)
class Flight:
    """What a worker of a schedule holds at most.

    Attributes:
        microbatches: of the whole model. A pipeline of n workers by 1F1B holds n of an n-th: 1.
        is_split: whether gradients of weights come late, so that all that they need waits for them,
            and nothing is saved by computing it again.
        copies: of the worker's share of the weights.
    """

    microbatches: float = 1.0
    is_split: bool = False
    copies: float = 1.0


def flight_of(setting: Setting, num: int) -> Flight:
    """That of a setting's schedule with so many microbatches."""
    if setting.family != "hybrid" or setting.pp == 1:
        return Flight()
    workers, rounds = min(setting.pp, MAX_WORKERS), min(ROUNDS, max(1, num // setting.pp))
    return _flight(setting.schedule, workers, rounds, setting.chunks)


@cache
def _flight(name: str, workers: int, rounds: int, chunks: int) -> Flight:
    try:
        schedule = generate(SCHEDULES[name], workers, rounds * workers, chunks=chunks)
    except ScheduleError:
        return Flight()
    stages = max(len(schedule.stages_of(worker)) for worker in range(workers))
    return Flight(
        max(schedule.peak_microbatches) / schedule.num_stages,
        any(action.kind is ActionKind.WEIGHTS for action in schedule.places),
        stages * workers / schedule.num_stages,
    )
