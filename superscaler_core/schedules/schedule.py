"""Schedule: which worker runs which actions, in which order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.completeness import check_complete, check_pairs
from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.versions import (
    WeightRule,
    check_updates,
    delays_of,
    versions_kept,
    versions_of,
)

_HEAD = re.compile(
    r"(\S+) stages=([0-9]{1,9}) microbatches=([0-9]{1,9})"
    rf"(?: weights=({'|'.join(WeightRule)}))?"
)
_ROW = re.compile(r"worker ([0-9]{1,9}):(.*)")

WorkerRoute = tuple[tuple[int, ...], ...]
"""For each stage, the workers that together run a microbatch through it, ascending."""

Pair = tuple[Action, Action]
"""A forward, and the backward of another microbatch that runs beside it."""


# Without slots, so that the index of places can be cached.
@dataclass(frozen=True)
class Schedule:
    """One training step of a pipeline: a row of actions for every worker, in its order.

    A *worker* runs stages: it is one device, or a group of devices that split the stage. A worker
    may hold several stages (interleaving). A stage may be on several workers: an action in several
    rows is run by these workers together (interlaced pipelines), or workers that hold copies of the
    stage run different microbatches (Chimera).

    A schedule without updates (U) is one step of synchronous training: weights are updated after
    it. A schedule with updates is a run of an asynchronous pipeline, from fill to drain.

    Laws (tests/superscaler_core/schedules/test_schedules.py): ``Schedule.parse(str(s)) == s``;
    every microbatch has one F, and one B or one I and one W, at every stage, on the same workers.
    Whether the rows can run at all depends on the data flow; ``timeline`` checks it.

    >>> from superscaler_core.schedules import one_f_one_b
    >>> print(one_f_one_b(2, 3))
    1f1b stages=2 microbatches=3
    worker 0: 0F0 0F1 0B0 0F2 0B1 0B2
    worker 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Attributes:
        name: one word.
        num_stages, num_microbatches: at least 1.
        rows: for each worker its actions, in its order.
        pairs: neighbours in a row that may run at the same time.
        weights: which versions of weights actions read; None if the schedule has no updates.

    Raises:
        ScheduleError: an action is missing, repeated, out of range or on the wrong workers; or a
            pair is not a forward and the backward of another microbatch right after it.
    """

    name: str
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Pair] = frozenset()
    weights: WeightRule | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        object.__setattr__(self, "pairs", frozenset(self.pairs))
        if not re.fullmatch(r"\S+", self.name):
            raise ScheduleError(f"a schedule's name is one word, got {self.name!r}.")
        what = f"schedule {self.name}"
        require_counts(what, num_stages=self.num_stages, num_microbatches=self.num_microbatches)
        check_complete(what, self.num_stages, self.num_microbatches, self.rows)
        check_pairs(what, self.rows, self.pairs)
        if self.weights is not None:
            object.__setattr__(self, "weights", WeightRule(self.weights))
        _ = self.versions

    @cached_property
    def partners(self) -> dict[Action, Action]:
        """For every action that is in a pair, the other action of the pair."""
        return {one: other for pair in self.pairs for one, other in (pair, pair[::-1])}

    @property
    def num_workers(self) -> int:
        return len(self.rows)

    @cached_property
    def places(self) -> dict[Action, tuple[int, ...]]:
        """Every action with the workers that run it, ascending."""
        places: dict[Action, tuple[int, ...]] = {}
        for worker, row in enumerate(self.rows):
            for action in row:
                places[action] = (*places.get(action, ()), worker)
        return places

    @property
    def num_recycling_passes(self) -> int:
        """Number of forwards without gradient at each stage, over all microbatches."""
        return sum(
            action.kind is ActionKind.RECYCLE and action.stage == 0 for action in self.places
        )

    @cached_property
    def microbatches_per_update(self) -> int:
        """Number of microbatches whose gradients an update applies; all if there are no updates."""
        what = f"schedule {self.name}"
        return check_updates(what, self.num_microbatches, self.rows, self.weights)

    @cached_property
    def versions(self) -> dict[Action, int]:
        """For every action, the version of its stage's weights that it reads, or makes (U).

        The dict is empty for a schedule without updates, which reads one version.
        """
        size = self.microbatches_per_update
        return {} if self.weights is None else versions_of(self.rows, self.weights, size)

    @cached_property
    def versions_kept(self) -> tuple[int, ...]:
        """For each stage, the most versions of its weights that exist at one time."""
        if self.weights is None:
            return (1,) * self.num_stages
        return versions_kept(self.rows, self.versions, self.num_stages)

    @cached_property
    def delays(self) -> tuple[Fraction, ...]:
        """For each stage, the average age of the weights of the last update's forwards, in updates.

        It is the delay between fill and drain if the run is long enough to fill the pipeline.
        """
        if self.weights is None:
            return (Fraction(0),) * self.num_stages
        counts = self.num_stages, self.num_microbatches, self.microbatches_per_update
        return delays_of(self.versions, *counts)

    def workers_of(self, stage: int, microbatch: int | None = None) -> tuple[int, ...]:
        """The workers of ``stage``, or only those that run ``microbatch`` there; ascending."""
        microbatches = range(self.num_microbatches) if microbatch is None else (microbatch,)
        return tuple(
            sorted(
                {w for m in microbatches for w in self.places[Action(ActionKind.FORWARD, stage, m)]}
            )
        )

    @cached_property
    def routes(self) -> tuple[WorkerRoute, ...]:
        """The distinct routes of microbatches, in the order of their first microbatches.

        There is one if every stage has one group of workers; a Chimera schedule has two.
        """
        return tuple(dict.fromkeys(self._ways))

    def route_of(self, microbatch: int) -> int:
        """The number of a microbatch's route in ``routes``."""
        return self.routes.index(self._ways[microbatch])

    @cached_property
    def _ways(self) -> tuple[WorkerRoute, ...]:
        """For each microbatch, the workers of every stage."""
        return tuple(
            tuple(self.workers_of(stage, microbatch) for stage in range(self.num_stages))
            for microbatch in range(self.num_microbatches)
        )

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that ``worker`` holds, ascending."""
        return tuple(sorted({action.stage for action in self.rows[worker]}))

    @cached_property
    def peak_microbatches(self) -> tuple[int, ...]:
        """The most activations that each worker holds, in microbatches of one stage.

        A microbatch counts from the start of its forward to the end of its B, or of its W, because
        W still needs its activations; the counts of all stages of the worker are added. If the
        microbatch has an R, it counts only from the R on, because its forward keeps only its
        inputs. A forward without gradient does not count.
        """
        again = {(a.stage, a.microbatch) for a in self.places if a.kind is ActionKind.RECOMPUTE}
        changes = (
            [held_by(action, (action.stage, action.microbatch) in again) for action in row]
            for row in self.rows
        )
        return tuple(max(accumulate(mine)) for mine in changes)

    def __str__(self) -> str:
        head = f"{self.name} stages={self.num_stages} microbatches={self.num_microbatches}"
        head += f" weights={self.weights}" if self.weights else ""
        firsts = {first for first, _ in self.pairs}
        rows = ("".join(f"{a}{'&' if a in firsts else ' '}" for a in row) for row in self.rows)
        return "\n".join([head, *(f"worker {w}: {row.rstrip()}" for w, row in enumerate(rows))])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text that ``str`` writes.

        Raises:
            ScheduleError: a line has another form, and is named; or the schedule is invalid.
        """
        head, *lines = text.strip().splitlines() or [""]
        found = _HEAD.fullmatch(head.strip())
        if found is None:
            raise _unreadable(1, head, "NAME stages=COUNT microbatches=COUNT")
        name, num_stages, num_microbatches, rule = found.groups()
        words = [_row(worker, line) for worker, line in enumerate(lines)]
        rows = tuple(tuple(action for word in row for action in word) for row in words)
        pairs = frozenset((word[0], word[1]) for row in words for word in row if word[1:])
        weights = WeightRule(rule) if rule else None
        return cls(name, int(num_stages), int(num_microbatches), rows, pairs, weights)


def held_by(action: Action, runs_again: bool) -> int:
    """The change, by an action, in the number of microbatches whose activations a worker holds.

    If the microbatch runs again (R) at the stage, its forward keeps only its inputs.
    """
    match action.kind:
        case ActionKind.FORWARD:
            return 0 if runs_again else 1
        case ActionKind.RECOMPUTE:
            return 1
        case ActionKind.BACKWARD | ActionKind.WEIGHTS:
            return -1
        case ActionKind.RECYCLE | ActionKind.INPUTS | ActionKind.UPDATE:
            return 0


def _row(worker: int, line: str) -> list[tuple[Action, ...]]:
    """The words of a line: one action each, or the two of a pair."""
    found = _ROW.fullmatch(line.strip())
    words = found[2].split() if found is not None else []
    if found is None or int(found[1]) != worker or any(word.count("&") > 1 for word in words):
        raise _unreadable(worker + 2, line, f"worker {worker}: ACTION ACTION&ACTION ...")
    return [tuple(map(Action.parse, word.split("&"))) for word in words]


def _unreadable(number: int, line: str, expected: str) -> ScheduleError:
    return ScheduleError(
        f"cannot parse line {number} of a schedule, {line[:80]!r}: expected '{expected}'."
    )
