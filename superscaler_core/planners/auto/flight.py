"""Flight: the activations and weights that a pipeline schedule makes a device hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from superscaler_core.planners.auto.setting import Setting
from superscaler_core.schedules import SCHEDULES, ActionKind, ScheduleError, generate

ROUNDS = 2
"""Microbatches per worker in the generated schedule; more do not increase those in flight."""

MAX_WORKERS = 8
"""Most workers of the generated schedule: longer pipelines hold nearly the same shares."""


@dataclass(frozen=True)
class Flight:
    """What the fullest worker of a schedule holds.

    Attributes:
        microbatches: activations, in microbatches of the whole model. 1F1B on n workers holds n
            microbatches of 1/n of the model: 1.
        is_split: whether gradients of weights are computed in a later action (W). All that they
            need is then kept until W, so recomputation saves nothing.
        copies: number of copies of every stage's weights; 2 for Chimera.
    """

    microbatches: float = 1.0
    is_split: bool = False
    copies: float = 1.0


def flight_of(setting: Setting, num: int) -> Flight:
    """The flight of a setting's schedule with ``num`` microbatches."""
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
