"""Reading: converts the arguments of a search to a ``Problem`` in whole numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import floor, gcd, lcm

from superscaler_core.published.tessel.problem import Problem, Task
from superscaler_core.schedules.action import ActionKind
from superscaler_core.schedules.dataflow import Edges
from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.schedule import WorkerRoute
from superscaler_core.schedules.timeline import Durations, Time, duration_of

_FORWARD, _BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
_INPUTS, _WEIGHTS = ActionKind.INPUTS, ActionKind.WEIGHTS


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """The arguments of a search; see ``search_schedule``."""

    routes: tuple[WorkerRoute, ...]
    durations: Durations
    num_microbatches: int
    memory_limit: Time | Sequence[Time] | None = None
    activations: Mapping[int, Time] | None = None
    edges: Edges | None = None

    def __post_init__(self) -> None:
        routes = tuple(tuple(tuple(sorted(set(team))) for team in r) for r in self.routes)
        object.__setattr__(self, "routes", routes)
        if self.edges is not None:
            object.__setattr__(self, "edges", tuple(self.edges))
        require_counts("search_schedule", num_microbatches=self.num_microbatches)
        used = {worker for route in self._taken for team in route for worker in team}
        every = {worker for route in routes for team in route for worker in team}
        lengths = {len(route) for route in routes}
        if len(lengths) != 1 or 0 in lengths or not all(team for r in routes for team in r):
            raise ScheduleError(
                f"search_schedule: routes {list(routes)}: a route names the workers of every "
                "stage, and all routes have equally many stages."
            )
        if every != set(range(len(every))) or used != every:
            raise ScheduleError(
                f"search_schedule: routes {list(routes)} use workers {sorted(every)}: they are "
                f"numbered from 0, and {self.num_microbatches} microbatches have to take every "
                "route."
            )

    @property
    def _taken(self) -> tuple[WorkerRoute, ...]:
        return self.routes[: self.num_microbatches]

    @property
    def num_workers(self) -> int:
        return 1 + max(worker for route in self.routes for team in route for worker in team)

    def kinds(self, stage: int) -> tuple[ActionKind, ...]:
        """F and B, or F, I and W if the durations give the stage no B."""
        has_whole = _BACKWARD in self.durations or (_BACKWARD, stage) in self.durations
        return (_FORWARD, _BACKWARD) if has_whole else (_FORWARD, _INPUTS, _WEIGHTS)

    def problem(self, max_ticks: int | None = None) -> Problem:
        """The request in whole numbers.

        Args:
            max_ticks: limit for the ticks of one microbatch's work on any worker. If the exact unit
                of time is finer, durations are rounded to the unit that meets the limit. None
                rounds nothing.

        Raises:
            ScheduleError: as in ``search_schedule``.
        """
        num_stages = len(self.routes[0])
        times = {
            (kind, stage): Fraction(duration_of(kind, stage, self.durations))
            for stage in range(num_stages)
            for kind in self.kinds(stage)
        }
        tick = _unit(times.values())
        if max_ticks is not None:
            work = max(
                sum((secs for (_, s), secs in times.items() if worker in route[s]), Fraction(0))
                for route in self._taken
                for worker in range(self.num_workers)
            )
            tick = max(tick, work / max_ticks)
        holds = [Fraction((self.activations or {}).get(stage, 1)) for stage in range(num_stages)]
        unit = _unit(holds)
        found = Problem(
            tuple(
                Task(
                    kind, stage, number, route[stage],
                    len(range(number, self.num_microbatches, len(self.routes))),
                    max(1, round(times[kind, stage] / tick)),
                    {_FORWARD: 1, _INPUTS: 0}.get(kind, -1) * int(holds[stage] / unit),
                    reads,
                )
                for number, route in enumerate(self._taken)
                for kind, stage, reads in self._flow(number)
            ),
            self._limits(unit),
            self.num_microbatches,
            tick,
        )  # fmt: skip
        self._check_memory(found, unit)
        return found

    def _flow(self, route: int) -> Iterator[tuple[ActionKind, int, tuple[int, ...]]]:
        """The tasks of a route, each after the tasks that it reads by the rules of ``dataflow``."""
        num_stages = len(self.routes[0])
        edges = tuple(pairwise(range(num_stages)) if self.edges is None else self.edges)
        srcs: dict[int, list[int]] = {stage: [] for stage in range(num_stages)}
        for src, dst in edges:
            if not (src in srcs and dst in srcs):
                raise ScheduleError(
                    f"edge {src} -> {dst}: search_schedule has stages 0 to {num_stages - 1}."
                )
            srcs[dst].append(src)
        try:
            order = tuple(TopologicalSorter(srcs).static_order())
        except CycleError as error:
            raise ScheduleError(
                f"search_schedule: the stages {error.args[1]} read each other in a circle; leave "
                "one of these edges out."
            ) from None
        count = sum(len(self.kinds(stage)) for stage in range(num_stages)) * route
        forward: dict[int, int] = {}
        back: dict[int, int] = {}
        for stage in order:
            yield _FORWARD, stage, tuple(forward[src] for src in srcs[stage])
            forward[stage] = count
            count += 1
        for stage in reversed(order):
            dsts = [dst for src, dst in edges if src == stage]
            kind, *rest = self.kinds(stage)[1:]
            yield kind, stage, (forward[stage], *(back[dst] for dst in dsts))
            back[stage] = count
            count += 1
            if rest:
                yield _WEIGHTS, stage, (back[stage],)
                count += 1

    def _limits(self, unit: Fraction) -> tuple[int | None, ...]:
        given = self.memory_limit
        each = [*given] if isinstance(given, Sequence) else [given] * self.num_workers
        if len(each) != self.num_workers:
            raise ScheduleError(
                f"search_schedule: {len(each)} memory limits of {self.num_workers} workers; give "
                "one each, or one for all."
            )
        return tuple(None if limit is None else floor(limit / unit) for limit in each)

    def _check_memory(self, problem: Problem, unit: Fraction) -> None:
        """Check that each worker can hold the activations of one microbatch of any route."""
        for worker, own in enumerate(problem.tasks_of):
            limit = problem.limits[worker]
            needs: dict[int, int] = {}
            for task in (problem.tasks[number] for number in own):
                needs[task.route] = needs.get(task.route, 0) + max(task.takes, 0)
            if limit is not None and limit < max(needs.values()):
                raise ScheduleError(
                    f"search_schedule: memory limit {limit * unit} of worker {worker}, which holds "
                    f"{max(needs.values()) * unit} of a single microbatch."
                )


def _unit(values: Collection[Fraction]) -> Fraction:
    """The largest number of which all values are multiples."""
    denominator = lcm(*(value.denominator for value in values))
    return Fraction(gcd(*(int(value * denominator) for value in values)), denominator)
