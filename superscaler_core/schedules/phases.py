"""Phases: a notation for rows of workers that hold two stages each, as words that repeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import require_counts
from superscaler_core.schedules.schedule import Pair, Schedule

Phase = tuple[int, str]
"""The number of times that some words run, and the words: ``(3, "F0&B1 W")``.

A word is a kind of action and the digit of one of the worker's ways. It runs the next microbatch of
that way. ``W`` without a digit runs the W that has waited longest, on either way. ``&`` joins a
pair.
"""

Ways = Mapping[str, tuple[int, Iterable[int]]]
"""For each way, by digit, its stage on the worker and the microbatches that take the way."""


def from_phases(
    name: str, num_stages: int, num_microbatches: int, rows: Iterable[tuple[Ways, Iterable[Phase]]]
) -> Schedule:
    """The schedule whose workers have these ways and run these phases.

    A word is skipped if no microbatch is left for it. So phases for many microbatches also work for
    few.
    """
    found: list[tuple[Action, ...]] = []
    pairs: set[Pair] = set()
    for ways, phases in rows:
        worker = _Worker(ways)
        words = [word for times, text in phases for _ in range(times) for word in text.split()]
        together = [[*map(worker.run, word.split("&"))] for word in words]
        done = [tuple(action for action in one if action is not None) for one in together]
        found.append(tuple(action for one in done for action in one))
        pairs.update((one[0], one[1]) for one in done if len(one) == 2)
    return Schedule(name, num_stages, num_microbatches, tuple(found), frozenset(pairs))


def folded(
    name: str, num_workers: int, num_microbatches: int, phases: Callable[[int], Iterable[Phase]]
) -> Schedule:
    """A schedule of one pipeline folded into a V, given the phases of each worker.

    Worker d of D holds stage d, way 0, and stage ``2 D - 1 - d``, way 1. A microbatch passes every
    worker on both ways, and its loss is computed on the worker where it began.

    Raises:
        ScheduleError: a count is below 1.
    """
    require_counts(name, num_workers=num_workers, num_microbatches=num_microbatches)
    num, every = 2 * num_workers, range(num_microbatches)
    rows = (
        ({"0": (worker, every), "1": (num - 1 - worker, every)}, phases(worker))
        for worker in range(num_workers)
    )
    return from_phases(name, num, num_microbatches, rows)


class _Worker:
    """The actions of one worker that are left to run."""

    def __init__(self, ways: Ways) -> None:
        self._stages = {way: stage for way, (stage, _) in ways.items()}
        self._forwards = {way: deque(microbatches) for way, (_, microbatches) in ways.items()}
        self._backwards = {way: deque(queue) for way, queue in self._forwards.items()}
        self._waiting: list[Action] = []

    def run(self, word: str) -> Action | None:
        """The next action of a word; None if no microbatch is left."""
        kind, way = ActionKind(word[0]), word[1:]
        if kind is ActionKind.WEIGHTS:
            ready = [a for a in self._waiting if not way or a.stage == self._stages[way]]
            self._waiting = [a for a in self._waiting if a not in ready[:1]]
            return ready[0] if ready else None
        queue = (self._backwards if kind.goes_back else self._forwards)[way]
        if not queue:
            return None
        action = Action(kind, self._stages[way], queue.popleft())
        if kind is ActionKind.INPUTS:
            self._waiting.append(Action(ActionKind.WEIGHTS, action.stage, action.microbatch))
        return action
