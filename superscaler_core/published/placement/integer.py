"""Integer programme: the best placement of a small problem, by HiGHS.

Objective: the time of a step, exactly as ``PlacementProblem`` defines it. x[g, d] = 1 if group g is
on device d. z[i, a, b] = 1 if result i is sent from device a to device b. e[v] is the end of
operation v, and m[i, b] the end of the message with result i to device b:

    sum of x[g, d] over d = 1,     z[i, a, b] >= x[writer, a] + x[reader, b] - 1
    e[v] - secs[v] >= 0
    e[v] - secs[v] >= e[u]                                      v reads u, or shares its group
    e[v] - secs[v] >= e[u] - M (2 - x[u, d] - x[v, d])          u is before v
    m[i, b] - secs[i, b] >= e[writer of i],     e[v] - secs[v] >= m[i, b] - M (1 - x[v, b])
    m[j, c] - secs[j, c] >= m[i, b] - M (2 - z[i, a, b] - z[j, a, c])      likewise at b's port

The problem fixes the orders of operations on devices and of messages at ports. So no variable
decides an order, and the least ends are those of the simulation. M is the time of a known
placement, which is an upper bound.

Complexity: exponential in the worst case; ``O(V**2 D + R**2 D**3)`` rows for V operations, R
results and D devices. It suits up to some 15 groups; above that, give a time limit.

Difference from Tarnawski et al. (``tarnawski_scattered``): their objective is the load of the
fullest device; here it is the time of one step with its dependencies.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from superscaler_core.errors import PlanError
from superscaler_core.integer_program import IntegerProgram
from superscaler_core.published.placement.earliest_finish import earliest_finish
from superscaler_core.published.placement.problem import PlacementProblem
from superscaler_core.space import Solution

TOLERANCE = 1e-6
"""Tolerance to which HiGHS meets rows, in units of the known placement's time."""

Entries = list[tuple[int, float]]


def integer_placement(problem: PlacementProblem, limit_secs: float | None = None) -> Solution:
    """Place groups by an integer programme.

    Args:
        problem: the placement problem.
        limit_secs: time limit in seconds; the best placement and the bound known by then count.

    Raises:
        PlanError: no placement fits in memory, or none was found in time.
    """
    known = _known(problem)
    program = _Program(problem, known)
    found = program.program.solve(limit_secs)
    options = [] if known is None else [known.assignment]
    bound = 0.0
    if found is not None:
        options.append(tuple(int(found.values[x].argmax()) for x in program.of_groups))
        bound = found.bound * program.unit_secs * (1 - TOLERANCE)
    # HiGHS may exceed memory by its tolerance; such a placement takes infinite time here.
    best = min(options, key=lambda option: float(problem.secs(option)), default=None)
    if best is None:
        raise problem.none_fits("integer programme")
    return problem.solution(best, "integer programme", bound)


def _known(problem: PlacementProblem) -> Solution | None:
    """The best of some placements without a search; None if none of them fits."""
    every = np.arange(problem.num_devices)[:, None].repeat(len(problem.groups), axis=1)
    options = [problem.solution(row, "one device") for row in every if problem.secs(row) < np.inf]
    with suppress(PlanError):
        options.append(earliest_finish(problem))
    return min(options, key=lambda option: option.secs, default=None)


class _Program:
    """The integer programme of a problem, with times in units of the known placement's time."""

    def __init__(self, problem: PlacementProblem, known: Solution | None) -> None:
        self.problem, self.program = problem, IntegerProgram()
        secs = np.where(np.isfinite(problem.op_secs), problem.op_secs, 0.0)
        # The time of everything one after another is an upper bound too.
        serial = secs.max(axis=1).sum() + problem.message_secs.sum()
        self.unit_secs = max(float(serial if known is None else known.secs), 1e-300)
        self.op_secs, self.message_secs = (
            secs / self.unit_secs,
            problem.message_secs / self.unit_secs,
        )
        self.most = 1 + TOLERANCE
        num, devices = len(problem.groups), range(problem.num_devices)
        add = self.program.variables
        (self.step,) = add(1, cost=1.0, most=self.most).tolist()
        self.x = add(num * len(devices), is_whole=True, most=1.0).reshape(num, -1)[problem.group_of]
        self.ends = add(len(problem.operations), most=self.most).tolist()
        self._place()
        self._operations()
        self._messages()

    @property
    def of_groups(self) -> NDArray[np.int64]:
        """The variables of every group, ``[group, device]``."""
        return self.x[[members[0] for members in self.problem.groups]]

    def _place(self) -> None:
        """Add rows: every group is on one device that can run it and has memory for it."""
        problem, row = self.problem, self.program.row
        mine = self.of_groups.tolist()
        for group, devices in enumerate(mine):
            row([(x, 1.0) for x in devices], least=1.0, most=1.0)
            for device, x in enumerate(devices):
                if not np.isfinite(problem.group_secs[group, device]):
                    row([(x, 1.0)], most=0.0)
        for device, memory in enumerate(problem.memory_bytes):
            if 0 < memory < np.inf:
                share = problem.group_bytes / memory
                row([(devices[device], share[g]) for g, devices in enumerate(mine)], most=1.0)

    def _start(self, number: int) -> Entries:
        """The start of an operation, as a sum of variables."""
        secs = zip(self.x[number].tolist(), (-self.op_secs[number]).tolist(), strict=True)
        return [(self.ends[number], 1.0), *secs]

    def _after(self, start: Entries, end: int, *conditions: Entries) -> None:
        """Add a row: ``start`` is at ``end`` or later, if the sum of every condition is 1."""
        entries = [*start, (end, -1.0)]
        for condition in conditions:
            entries += [(variable, -self.most * factor) for variable, factor in condition]
        self.program.row(_summed(entries), least=-self.most * len(conditions))

    def _operations(self) -> None:
        problem = self.problem
        for end in self.ends:
            self.program.row([(self.step, 1.0), (end, -1.0)], least=0.0)
        for v in range(len(problem.operations)):
            self.program.row(self._start(v), least=0.0)
            before = {problem.results[i].writer for i in problem.reads[v]}
            for u in range(v):
                if u in before or problem.group_of[u] == problem.group_of[v]:
                    self._after(self._start(v), self.ends[u])
                    continue
                for here, there in zip(self.x[u].tolist(), self.x[v].tolist(), strict=True):
                    self._after(self._start(v), self.ends[u], [(here, 1.0)], [(there, 1.0)])

    def _messages(self) -> None:
        problem, devices = self.problem, range(self.problem.num_devices)
        sent: list[tuple[int, int, int, Entries, dict[int, Entries]]] = []
        order = [i for writes in problem.writes for i in writes]
        for i in order:
            result = problem.results[i]
            for dst in devices:
                others = [src for src in devices if src != dst]
                z = dict(
                    zip(others, self.program.variables(len(others), most=1.0).tolist(), strict=True)
                )
                (end,) = self.program.variables(1, most=self.most).tolist()
                start = [
                    (end, 1.0),
                    *((z[src], -float(self.message_secs[i, src, dst])) for src in others),
                ]
                self._after(start, self.ends[result.writer])
                for reader in result.readers:
                    there = int(self.x[reader, dst])
                    self._after(self._start(reader), end, [(there, 1.0)])
                    for src in others:
                        here = int(self.x[result.writer, src])
                        entries = [(z[src], 1.0), (here, -1.0), (there, -1.0)]
                        self.program.row(_summed(entries), least=-1.0)
                ports = {src: [(z[src], 1.0)] for src in others}
                sent.append((i, dst, end, start, ports))
        for (_, b, end, _, first), (_, c, _, start, second) in combinations(sent, 2):
            for src in first.keys() & second.keys():
                self._after(start, end, first[src], second[src])
            if b == c:
                arriving = [[z for (z,) in ports.values()] for ports in (first, second)]
                self._after(start, end, *arriving)


def _summed(entries: Entries) -> Entries:
    """An equal sum in which every variable occurs once."""
    found: dict[int, float] = {}
    for variable, factor in entries:
        found[variable] = found.get(variable, 0.0) + factor
    return list(found.items())
