"""Chimera: two pipelines in opposite directions over the same workers (Li and Hoefler, 2021)."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler_core.plans import Pipeline
from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.schedule import Schedule


def chimera(num_workers: int, num_microbatches: int) -> Schedule:
    """Worker d holds stage d of the pipeline down, and stage D - 1 - d of the pipeline up.

    Microbatches come in rounds of D; the last round may have fewer. The first half of a round goes
    down, the second half up. Each pipeline runs its half as 1F1B does, and fills the idle time of
    the other pipeline. If a backward takes as long as a forward, ``(D - 2) / (2 N + D - 2)`` of the
    makespan is idle; if it takes as long as two forwards, ``(D - 2) / (3 N / 2 + D - 2)`` for
    N = D, and more for several rounds. A worker holds the weights of two stages, and from
    ``D / 2 + 1`` (first and last worker) to D microbatches.

    >>> print(chimera(2, 2))
    chimera stages=2 microbatches=2
    worker 0: 0F0 1F1 1B1 0B0
    worker 1: 0F1 1F0 1B0 0B1

    Args:
        num_workers: D, even.
        num_microbatches: N, at least 1. The figures above hold for multiples of D.

    Raises:
        ScheduleError: D is odd, or a count is below 1.

    Source: Li and Hoefler, Chimera, SC 2021: the schedule of two pipelines, rounds concatenated.
    """
    require_counts("chimera", num_workers=num_workers, num_microbatches=num_microbatches)
    if num_workers % 2:
        raise ScheduleError(
            f"chimera of {num_workers} workers: it takes an even number, so that the pipelines of "
            "both directions meet in the middle."
        )
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(num_workers)]
    for microbatch in range(num_microbatches):
        round_, place = divmod(microbatch, num_workers)
        size = min(num_workers, num_microbatches - round_ * num_workers)
        goes_up, place = divmod(place, -(-size // 2))
        start = 2 * (round_ * num_workers + place)
        for stage in range(num_workers):
            worker = num_workers - 1 - stage if goes_up else stage
            rows[worker] += _timed(num_workers, stage, microbatch, start)
    in_order = (tuple(action for _, action in sorted(row)) for row in rows)
    return Schedule("chimera", num_workers, num_microbatches, tuple(in_order))


def _timed(
    num_stages: int, stage: int, microbatch: int, start: int
) -> Iterator[tuple[int, Action]]:
    """When a pipeline runs each action of a stage, if every action takes one unit of time.

    On each worker the forwards of one pipeline and the backwards of the other start at times of
    the same parity, but in ranges that do not overlap; so no time has two actions.
    """
    yield start + stage, Action(ActionKind.FORWARD, stage, microbatch)
    yield start + 2 * num_stages - 1 - stage, Action(ActionKind.BACKWARD, stage, microbatch)


PLAN = Pipeline(
    "chimera",
    "Half of the microbatches go down pp groups of devices, an even number, and half of them up. "
    "Once per step the gradients of every stage are summed over its two groups. Memory per group: "
    "2/pp of the weights; activations of pp/2 + 1 (first and last group) to pp (middle) "
    "microbatches of a stage. Source: Li and Hoefler, Chimera, SC 2021.",
    microbatches=0,
    per_worker=1,
)
