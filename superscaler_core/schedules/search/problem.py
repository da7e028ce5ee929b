"""Problem: what a search for a schedule places in time, in whole numbers."""

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
    of them to the k-th microbatch. If an action reads another, then at its k-th start at least k
    actions that it reads have ended, so the k-th of them has; and memory depends only on how many
    actions have run. So a schedule is known by the times of each task's actions.

    Attributes:
        kind, stage, route: of the actions.
        workers: that run each of them together.
        num: number of the actions.
        ticks: duration of one, at least 1.
        takes: memory that each of the workers holds from the start of an action (an F), or frees
            at its end if below 0 (a B or W).
        reads: the tasks, by number, whose actions end before those of this one start.
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


# Without slots, so that what follows from the tasks can be cached.
@dataclass(frozen=True)
class Problem:
    """Tasks, and the memory of workers.

    Attributes:
        tasks: every task after those that it reads.
        limits: of each worker, memory in the units of ``Task.takes``; None is no limit.
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
        """For each task, the least ticks from the start of a microbatch to its action's start."""
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

        A worker waits for its first action, runs all of its own, and then the last microbatch goes
        on without it.
        """
        return max(
            min(self.heads[t] for t in own)
            + sum(self.tasks[t].num * self.tasks[t].ticks for t in own)
            + min(self.tails[t] for t in own)
            for own in self.tasks_of
        )

    def schedule(self, name: str, starts: Starts) -> Schedule:
        """The schedule of which the actions start at these times."""
        rows: list[list[tuple[int, Action]]] = [[] for _ in self.limits]
        for task, times in zip(self.tasks, starts, strict=True):
            for k, start in enumerate(times):
                action = Action(task.kind, task.stage, self.microbatch(task, k))
                for worker in task.workers:
                    rows[worker].append((start, action))
        num_stages = 1 + max(task.stage for task in self.tasks)
        in_order = tuple(tuple(action for _, action in sorted(row)) for row in rows)
        return Schedule(name, num_stages, self.num_microbatches, in_order)
