"""In list: list scheduling, a heuristic that repeatedly starts the most urgent possible action."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from superscaler_core.published.tessel.problem import Problem, Starts, Task
from superscaler_core.schedules.action import ActionKind

Rule = Callable[[Problem, int], tuple[int, ...]]
"""Gives the urgency of a task, by its number; the task with the least value is first."""

_BACK_FIRST = {kind: i for i, kind in enumerate("BIFW")}


def _back_first(problem: Problem, task: int) -> tuple[int, ...]:
    """Backwards first, because they free memory; W's last, because nothing waits for them."""
    one = problem.tasks[task]
    return (_BACK_FIRST[one.kind], problem.tails[task])


def _forward_first(problem: Problem, task: int) -> tuple[int, ...]:
    one = problem.tasks[task]
    return ("FBIW".index(one.kind), problem.tails[task])


def _longest_tail(problem: Problem, task: int) -> tuple[int, ...]:
    """First the action after which its microbatch takes longest."""
    return (-problem.tails[task],)


def _shortest_tail(problem: Problem, task: int) -> tuple[int, ...]:
    """First the action that is nearest to its microbatch's end; W's last."""
    return (problem.tasks[task].kind is ActionKind.WEIGHTS, problem.tails[task])


RULES: tuple[Rule, ...] = (_back_first, _forward_first, _longest_tail, _shortest_tail)


def in_list(problem: Problem, rule: Rule) -> Starts:
    """The starts of all actions; the next action is the most urgent of those that can start first.

    The heuristic always ends: a worker starts a microbatch only if its memory suffices to end this
    microbatch and all earlier ones, one after another (Dijkstra's banker's algorithm with the
    microbatches as customers).
    """
    numbers = range(len(problem.tasks))
    urgency = [rule(problem, number) for number in numbers]
    state = _State(problem)
    for _ in range(sum(task.num for task in problem.tasks)):
        ready = {number: state.start(number) for number in numbers if state.can_run(number)}
        state.run(min(ready, key=lambda number: (ready[number], urgency[number], number)))
    return state.starts


class _State:
    """The actions that have been started so far, and the memory that microbatches hold."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.starts: list[list[int]] = [[] for _ in problem.tasks]
        self._free = [0] * problem.num_workers
        # For each worker and microbatch, the memory that it holds and the memory it will yet take.
        self._held = [[0] * problem.num_microbatches for _ in problem.limits]
        self._needs = [[0] * problem.num_microbatches for _ in problem.limits]
        for task in problem.tasks:
            for worker, k in product(task.workers, range(task.num)):
                self._needs[worker][problem.microbatch(task, k)] += max(task.takes, 0)

    def can_run(self, number: int) -> bool:
        """Whether the task's next action has the data that it reads, and enough memory."""
        task, done = self.problem.tasks[number], len(self.starts[number])
        return (
            done < task.num
            and all(len(self.starts[other]) > done for other in task.reads)
            and all(self._is_safe(worker, task, done) for worker in task.workers)
        )

    def start(self, number: int) -> int:
        """When the task's next action can start."""
        task, done = self.problem.tasks[number], len(self.starts[number])
        ends = (self.starts[i][done] + self.problem.tasks[i].ticks for i in task.reads)
        return max(*(self._free[worker] for worker in task.workers), *ends, 0)

    def run(self, number: int) -> None:
        """Start the task's next action."""
        task, start = self.problem.tasks[number], self.start(number)
        microbatch = self.problem.microbatch(task, len(self.starts[number]))
        self.starts[number].append(start)
        for worker in task.workers:
            self._free[worker] = start + task.ticks
            self._held[worker][microbatch] += task.takes
            self._needs[worker][microbatch] -= max(task.takes, 0)

    def _is_safe(self, worker: int, task: Task, done: int) -> bool:
        limit = self.problem.limits[worker]
        if task.takes <= 0 or limit is None:
            return True
        held, needs = self._held[worker], self._needs[worker]
        last = self.problem.microbatch(task, done)
        left = limit - sum(held) - task.takes
        for microbatch in range(last + 1):
            if needs[microbatch] - (task.takes if microbatch == last else 0) > left:
                return False
            left += held[microbatch]
        return left >= 0
