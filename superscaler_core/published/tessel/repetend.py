"""Repetend: the pattern that a long schedule repeats, with the best way into it and out of it.

In the middle of a step of many microbatches, every task runs its actions at equal intervals. The
search solves three small problems instead of a large one: the shortest pattern that can be
repeated; then the shortest time for all actions that must run before the pattern; and the shortest
time for the actions after it. Each solution is optimal by itself; together they are a heuristic,
because another pattern of the same length may have a shorter way in and out.

Source: Lin et al., Tessel: Boosting Distributed Execution of Large DNN Models via Flexible
Schedule Search, 2023, which uses an SMT solver in place of our tables of counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superscaler_core.published.tessel.bisection import least
from superscaler_core.published.tessel.counts import Line, Ring, Table, find_counts
from superscaler_core.published.tessel.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Repetend:
    """A period in which every task runs ``growth`` actions, on the microbatches it has come to.

    Attributes:
        table: how many actions of a task have started by a tick of a period, ``[task, tick]``. The
            task that is furthest behind has started no action before the period.
        growth: microbatches of every route in a period.
    """

    table: Table
    growth: int

    @property
    def num_ticks(self) -> int:
        return int(self.table.shape[1])

    def count(self, task: int, tick: int) -> int:
        """How many actions of a task have started by a tick; the period is at ticks 0, 1, ..."""
        rounds, tick = divmod(tick, self.num_ticks)
        return int(self.table[task, tick]) + rounds * self.growth


MAX_GROWTH = 3
"""Most microbatches of a route that are tried in a period. If memory is scarce, a period of several
microbatches may take less time per microbatch than a period of one."""


def repeated(problem: Problem, deadline: float) -> Table | None:
    """The counts of a schedule that repeats a pattern; None if there are too few microbatches.

    Args:
        problem: the tasks.
        deadline: by ``time.monotonic``; past it, the best so far is taken.
    """
    repetend = find_repetend(problem, deadline)
    tasks = range(len(problem.tasks))
    ahead = max(repetend.count(task, -1) for task in tasks)
    num_periods = (min(task.num for task in problem.tasks) - ahead) // repetend.growth
    if num_periods < 1:
        return None
    middle = [
        [repetend.count(task, tick) for tick in range(num_periods * repetend.num_ticks)]
        for task in tasks
    ]
    more = num_periods * repetend.growth
    return np.concatenate(
        [
            _way_in(problem, repetend, deadline),
            np.array(middle),
            _way_out(problem, repetend, more, deadline) + more,
        ],
        axis=1,
    )


def find_repetend(problem: Problem, deadline: float) -> Repetend:
    """The repetend that takes the least time per microbatch, for any growth up to ``MAX_GROWTH``.

    Any period can be made longer: all actions that start after one point of it start later. So
    bisection finds the shortest period. Patterns are left out in which a microbatch takes more than
    twice its time alone plus two periods.
    """
    # No period is shorter than the work of a worker, and all actions run one by one are a period.
    work = max(sum(problem.tasks[task].ticks for task in own) for own in problem.tasks_of)
    alone = max(
        head + task.ticks + tail
        for head, task, tail in zip(problem.heads, problem.tasks, problem.tails, strict=True)
    )
    best = _one_by_one(problem)
    for growth in range(1, MAX_GROWTH + 1):
        if best.num_ticks == work * best.growth:
            break

        def solve(num_ticks: int, growth: int = growth) -> tuple[int, Repetend] | None:
            ring = Ring(num_ticks, growth, growth * (2 + 2 * alone // work))
            table = find_counts(problem, ring, deadline)
            if table is None:
                return None
            # The task that is furthest behind has started nothing before the period.
            return num_ticks, Repetend(table - (int(table[:, -1].min()) - growth), growth)

        # A period that takes no less time per microbatch is not better.
        high = -(-best.num_ticks * growth // best.growth)
        _, best, _ = least(work * growth, high, best, solve)
    return best


def _one_by_one(problem: Problem) -> Repetend:
    """The repetend that runs the actions of one microbatch of each route one by one."""
    ends = np.cumsum([task.ticks for task in problem.tasks])
    starts = ends - [task.ticks for task in problem.tasks]
    ticks = np.arange(ends[-1])
    return Repetend((ticks[None, :] >= starts[:, None]).astype(np.int64), 1)


def _way_in(problem: Problem, repetend: Repetend, deadline: float) -> Table:
    """The counts of the shortest way from an empty pipeline to the first period."""

    def solve(num_ticks: int) -> tuple[int, Table] | None:
        def known(task: int, tick: int) -> int | None:
            if tick >= num_ticks:
                return repetend.count(task, tick - num_ticks)
            return 0 if tick < problem.heads[task] else None

        table = find_counts(problem, Line(num_ticks, known), deadline)
        return None if table is None else (num_ticks, table)

    # A known way in is the pattern itself, from the point where it runs the first microbatch.
    tasks = range(len(problem.tasks))
    ahead = max(repetend.count(task, -1) for task in tasks)
    high = -(-ahead // repetend.growth) * repetend.num_ticks
    counts = [[max(repetend.count(t, tick), 0) for tick in range(-high, 0)] for t in tasks]
    return least(0, high, np.array(counts).reshape(len(tasks), high), solve)[1]


def _way_out(problem: Problem, repetend: Repetend, more: int, deadline: float) -> Table:
    """The counts of the shortest way from a period to the end; the caller adds ``more`` to them."""
    final = [task.num - more for task in problem.tasks]

    def solve(num_ticks: int) -> tuple[int, Table] | None:
        def known(task: int, tick: int) -> int | None:
            if tick < 0:
                return repetend.count(task, tick)
            is_late = tick >= num_ticks - problem.tails[task] - problem.tasks[task].ticks
            return final[task] if is_late else None

        table = find_counts(problem, Line(num_ticks, known), deadline)
        return None if table is None else (num_ticks, table)

    # A known way out is the pattern itself, up to the point where it has run the last microbatch.
    tasks = range(len(problem.tasks))
    behind = [final[task] - repetend.count(task, -1) for task in tasks]
    low = max(problem.tails[t] + problem.tasks[t].ticks if behind[t] else 0 for t in tasks)
    longest = max(task.ticks for task in problem.tasks)
    high = -(-max(behind) // repetend.growth) * repetend.num_ticks + longest
    counts = [[min(repetend.count(t, tick), final[t]) for tick in range(high)] for t in tasks]
    return least(low, high, np.array(counts), solve)[1]
