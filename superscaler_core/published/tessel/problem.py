"""Problem: the tasks that a search for a schedule places in time, in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.timeline import Time


@dataclass(frozen=True, slots=True)
class Task:
    """All actions of one kind at one stage on one route: one for every microbatch of the route.

    Microbatches of a route are alike. So there is a best schedule in which every task runs them in
    ascending order: sort the times at which any schedule runs a task's actions, and give the k-th
    time to the k-th microbatch. If a task reads another task, then at the k-th start of the first
    at least k actions of the second have ended, so its k-th action has; and memory depends only on
    how many actions have run. So a schedule is determined by the times of each task's actions.

    Attributes:
        kind, stage, route: those of the actions.
        workers: the workers that run each action together.
        num: number of the actions.
        ticks: duration of one action, at least 1.
        takes: memory that each of the workers holds from the start of an action (an F), or frees
            at its end if below 0 (a B or W).
        reads: numbers of the tasks whose k-th action ends before the k-th action of this one
            starts.
    """

    kind: ActionKind
    stage: int
    route: int
    workers: tuple[int, ...]
    num: int
    ticks: int
    takes: int
    reads: tuple[int, ...]


Starts = Sequence[Sequence[int]]
"""For each task, the starts of its actions in ticks, ascending."""


# Without slots, so that properties can be cached.
@dataclass(frozen=True)
class Problem:
    """A scheduling problem: tasks, and the memory of workers.

    Attributes:
        tasks: every task after the tasks that it reads.
        limits: memory of each worker, in the units of ``Task.takes``; None is no limit.
        num_microbatches: microbatch m takes route ``m % number of routes``.
        tick: time of a tick, in the unit of the durations.
    """

    tasks: tuple[Task, ...]
    limits: tuple[int | None, ...]
    num_microbatches: int
    tick: Time

    @property
    def num_workers(self) -> int:
        return len(self.limits)

    @property
    def num_routes(self) -> int:
        return 1 + max(task.route for task in self.tasks)

    def microbatch(self, task: Task, k: int) -> int:
        """The microbatch of the k-th action of a task."""
        return task.route + k * self.num_routes

    @cached_property
    def tasks_of(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the tasks of each worker."""
        tasks = range(len(self.tasks))
        return tuple(
            tuple(t for t in tasks if w in self.tasks[t].workers) for w in range(self.num_workers)
        )

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """For each task, the least ticks from a microbatch's start to the start of its action."""
        ends: list[int] = []
        for task in self.tasks:
            ends.append(max((ends[other] for other in task.reads), default=0) + task.ticks)
        return tuple(end - task.ticks for end, task in zip(ends, self.tasks, strict=True))

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """For each task, the least ticks from the end of an action to the end of its microbatch."""
        tails = [0] * len(self.tasks)
        for number in reversed(range(len(self.tasks))):
            for other in self.tasks[number].reads:
                behind = tails[number] + self.tasks[number].ticks
                tails[other] = max(tails[other], behind)
        return tuple(tails)

    def makespan(self, starts: Starts) -> int:
        """When the last action ends, in ticks."""
        return max(times[-1] + t.ticks for t, times in zip(self.tasks, starts, strict=True))

    @cached_property
    def bound(self) -> int:
        """A lower bound of the makespan in ticks: no worker can be faster.

        A worker waits for its first action, runs all its actions, and then the last microbatch
        continues on other workers.
        """
        return max(
            min(self.heads[t] for t in own)
            + sum(self.tasks[t].num * self.tasks[t].ticks for t in own)
            + min(self.tails[t] for t in own)
            for own in self.tasks_of
        )

    def schedule(self, name: str, starts: Starts) -> Schedule:
        """The schedule whose actions start at these times."""
        rows: list[list[tuple[int, Action]]] = [[] for _ in self.limits]
        for task, times in zip(self.tasks, starts, strict=True):
            for k, start in enumerate(times):
                action = Action(task.kind, task.stage, self.microbatch(task, k))
                for worker in task.workers:
                    rows[worker].append((start, action))
        num_stages = 1 + max(task.stage for task in self.tasks)
        in_order = tuple(tuple(action for _, action in sorted(row)) for row in rows)
        return Schedule(name, num_stages, self.num_microbatches, in_order)
