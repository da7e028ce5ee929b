"""Counts: how many actions of each task have started by each tick, found by integer programming.

A schedule of tasks in time is a table ``N[task, tick]``, the number of the task's actions that
start at the tick or before. All rules are linear in it, and most are differences of two entries:

- counts never decrease: ``N[a, t - 1] <= N[a, t]``;
- if b reads a, it starts when a has ended: ``N[b, t] <= N[a, t - ticks of a]``;
- a worker runs one action at a time: ``sum of (N[a, t] - N[a, t - ticks of a]) <= 1``;
- the memory of a worker: ``sum of takes * N[F, t] - sum of takes * N[B, t - ticks of B] <= limit``.

Before the table's first tick and after its last, the counts are known (``Line``); or the table is
one period of a pattern that repeats for ever (``Ring``). The solver is HiGHS, by
``scipy.optimize.milp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from superscaler_core.published.tessel.problem import Problem
from superscaler_core.schedules.errors import ScheduleError

Table = np.ndarray[Any, np.dtype[np.int64]]
"""Counts, ``[task, tick]``."""


MAX_NODES = 200
"""Most nodes of a branch and bound without a deadline. Most tables are found at the first node."""


class OutOfTimeError(ScheduleError):
    """A search ended without an answer, because its time was over."""


@dataclass(frozen=True, slots=True)
class Line:
    """A table from tick 0 on.

    Attributes:
        num_ticks: number of ticks of the table.
        known: the count of a task at a tick if it is given, as all counts before and after the
            table are; None if the solver has to find the count.
    """

    num_ticks: int
    known: Callable[[int, int], int | None]

    def entry(self, task: int, tick: int) -> tuple[int | None, int]:
        """The tick of the table that has a count (None if it is known), and a number to add."""
        known = self.known(task, tick)
        return (tick, 0) if known is None else (None, known)


@dataclass(frozen=True, slots=True)
class Ring:
    """A table that repeats: in every ``num_ticks``, each task runs ``growth`` actions more.

    No count is above ``most``. Without that bound, HiGHS may raise the counts of an infeasible
    ring for ever.
    """

    num_ticks: int
    growth: int
    most: int

    def entry(self, task: int, tick: int) -> tuple[int | None, int]:
        """The tick of the table that has a count, and a number to add to the count."""
        rounds, tick = divmod(tick, self.num_ticks)
        return tick, rounds * self.growth


def find_counts(problem: Problem, frame: Line | Ring, deadline: float) -> Table | None:
    """A table that follows all rules; None if there is none.

    Args:
        problem: the tasks.
        frame: the size of the table, and the counts outside of it.
        deadline: by ``time.monotonic``; if infinite, the solver's nodes are limited instead.

    Raises:
        OutOfTimeError: the deadline, or the limit of nodes, came first.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # Takes half a second to import.
    from scipy.sparse import coo_array

    shape = (len(problem.tasks), frame.num_ticks)
    rows: list[int] = []
    columns: list[int] = []
    factors: list[int] = []
    tops: list[int] = []
    for terms, top in _rules(problem, frame):
        size = len(columns)
        for factor, task, tick in terms:
            inside, constant = frame.entry(task, tick)
            top -= factor * constant
            if inside is not None:
                rows.append(len(tops))
                columns.append(task * frame.num_ticks + inside)
                factors.append(factor)
        if len(columns) == size and top < 0:
            return None  # The known counts alone break the rule.
        tops.append(top)
    size = shape[0] * shape[1]
    if not size:
        return np.zeros(shape, np.int64)
    left_secs = deadline - monotonic()
    if left_secs <= 0:
        raise OutOfTimeError("the search for a schedule has no answer yet: its time is over.")
    found = milp(
        np.zeros(size),
        constraints=LinearConstraint(
            coo_array((factors, (rows, columns)), shape=(len(tops), size)).tocsr(), ub=tops
        ),
        bounds=Bounds(0, frame.most if isinstance(frame, Ring) else np.inf),
        integrality=np.ones(size),
        options={"node_limit": MAX_NODES} if left_secs == np.inf else {"time_limit": left_secs},
    )
    if found.x is not None:
        table: Table = np.rint(found.x).astype(np.int64).reshape(shape)
        for task, tick in np.ndindex(shape):
            inside, constant = frame.entry(task, tick)
            table[task, tick] = constant if inside is None else table[task, tick]
        return table
    if found.status == _OUT_OF_TIME:
        raise OutOfTimeError("the search for a schedule has no answer yet: its time is over.")
    assert found.status == _INFEASIBLE, found.message
    return None


_OUT_OF_TIME, _INFEASIBLE = 1, 2

_Rule = tuple[list[tuple[int, int, int]], int]
"""Terms (factor, task, tick), and a number that the sum of the terms may not exceed."""


def _rules(problem: Problem, frame: Line | Ring) -> Iterator[_Rule]:
    longest = max(task.ticks for task in problem.tasks)
    # After the end of a line, its last actions may still run.
    for tick in range(frame.num_ticks + (longest if isinstance(frame, Line) else 0)):
        for number, task in enumerate(problem.tasks):
            yield [(1, number, tick - 1), (-1, number, tick)], 0
            for other in task.reads:
                ended = tick - problem.tasks[other].ticks
                yield [(1, number, tick), (-1, other, ended)], 0
        for own, limit in zip(problem.tasks_of, problem.limits, strict=True):
            running, held = [], []
            for number in own:
                task = problem.tasks[number]
                running += [(1, number, tick), (-1, number, tick - task.ticks)]
                if task.takes:
                    since = tick if task.takes > 0 else tick - task.ticks
                    held.append((task.takes, number, since))
            yield running, 1
            if limit is not None:
                yield held, limit
