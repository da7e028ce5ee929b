"""Alpa's intra-op planner: how the ops of a mesh are cut, as an integer programme.

Objective: the time of a step of a ``Space``. The vector ``s_v`` names the choice of node v, and the
matrix ``e_vw`` the pair of choices of two neighbours (one entry is 1, all others are 0):

    min  sum_v  s_v . node_secs_v  +  sum_(v,w)  e_vw . pair_secs_vw
    with sum(s_v) = 1,  sum_columns(e_vw) = s_v,  sum_rows(e_vw) = s_w,  all at least 0,
         sum_v  s_v . held_bytes_v  +  work  <=  memory_bytes,   s_v . work_bytes_v <= work,
         s_v whole numbers.

The linear relaxation (without the last line) is solved first. If its values are whole numbers, they
are the optimum; only otherwise does HiGHS branch. The first try ignores memory. Nodes with at most
two neighbours are then eliminated before the programme is built (``elimination``): the blocks of a
transformer vanish, and only nodes with many neighbours remain. If the optimum does not fit, the
programme of all nodes is solved with the memory rows.

Complexity: exponential in the core (the remaining nodes) in the worst case; the elimination is
linear in the nodes.

Differences from the published code (``alpa/shard_parallel/auto_sharding.py``):

- an infinite cost excludes a pair of choices; it also expresses that a node follows another, and
  that two nodes share a buffer;
- the sums of the pair variables equal the nodes' choices; there they are at most these. The
  whole solutions are equal, and the bound of the relaxation is at least as high;
- memory is the sum of what all nodes hold, plus the largest work memory of one node; there it is a
  sum for every point of time;
- HiGHS replaces CBC.

Source: Zheng et al., Alpa, OSDI 2022, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from superscaler_core.integer_program import IntegerProgram
from superscaler_core.planners.proposals import propose_space
from superscaler_core.planners.row import PlannerRow
from superscaler_core.space import Array, Solution, Space
from superscaler_core.space.elimination import Core

FULL = 1e-6
"""Values this near to a whole number count as whole; HiGHS has the same tolerance."""

UNIT = 1e4
"""The largest costs of all tables are scaled to add up to this, so that HiGHS's tolerance of 1e-7
is 1e-11 of a step."""


def alpa_intra(space: Space, *, limit_secs: float = 60.0) -> Solution:
    """The assignment of the least time that fits in memory.

    Args:
        space: the space to search.
        limit_secs: time limit of each HiGHS run, in seconds; the best assignment known then counts.

    Returns:
        A solution whose ``bound_secs`` equals ``secs``, up to rounding, unless a time limit was
        reached.

    Raises:
        PlanError: no assignment fits, or none was found in time.
    """
    free = Core.of(space)
    free.eliminate()
    found = _solved(space, free, inf, limit_secs)
    if found is None or found.secs == inf:
        raise space.none_fits("Alpa's intra-op planner")
    # The optimum without a memory limit is the optimum, if it fits.
    if space.fits(found.assignment):
        return found
    # HiGHS may exceed a limit by its tolerance; the second, lower limit leaves room for that.
    for memory_bytes in (space.memory_bytes, space.memory_bytes * (1 - FULL)):
        limited = _solved(space, Core.of(space), memory_bytes, limit_secs)
        if limited is not None and space.fits(limited.assignment):
            return limited
    raise space.none_fits("Alpa's intra-op planner")


def _solved(space: Space, core: Core, memory_bytes: float, limit_secs: float) -> Solution | None:
    """The best assignment of a core; None if HiGHS found none."""
    if not core.node_secs:
        return space.solution(core.assignment({}), float(core.secs))
    programme = _Programme.of(space, core, memory_bytes)
    optimum = programme.rows.solve(limit_secs, is_relaxed=True)
    if optimum is None:
        return None
    if not programme.is_whole(optimum.values):
        optimum = programme.rows.solve(limit_secs)
        if optimum is None:
            return None
    found = space.solution(core.assignment(programme.chosen(optimum.values)))
    bound = float(core.secs) + optimum.bound / programme.per_sec
    return Solution(found.assignment, found.secs, min(found.secs, max(0.0, bound)))


@dataclass(frozen=True, eq=False)
class _Programme:
    """The integer programme of a core.

    Attributes:
        rows: the programme.
        variables: for every node the variables of its choices, ``[choice]``; -1 for a choice that
            is impossible.
        per_sec: units of cost per second.
    """

    rows: IntegerProgram
    variables: dict[int, NDArray[np.int64]]
    per_sec: float

    @classmethod
    def of(cls, space: Space, core: Core, memory_bytes: float) -> _Programme:
        """The programme of a core; without memory rows if ``memory_bytes`` is infinite."""
        tables = [*core.node_secs.values(), *core.pair_secs.values()]
        scale = sum(each.max(where=np.isfinite(each), initial=0.0) for each in tables)
        made = cls(IntegerProgram(), {}, UNIT / scale if scale > 0 else 1.0)
        for node, secs in core.node_secs.items():
            made.variables[node] = made._named(secs, is_whole=True)
            made._sum(made.variables[node], 1.0)
        for (a, b), secs in core.pair_secs.items():
            ends = made.variables[a], made.variables[b]
            # A pair is impossible if one of its choices is.
            can_be = (ends[0] >= 0)[:, None] & (ends[1] >= 0)
            named = made._named(np.where(can_be, secs, inf), is_whole=False)
            for end, pairs in ((ends[0], named), (ends[1], named.T)):
                for choice, row in zip(end.tolist(), pairs, strict=True):
                    if choice >= 0:
                        made._sum(row, 0.0, [(choice, -1.0)])
        if memory_bytes < inf:
            made._limit(space, memory_bytes)
        return made

    def _named(self, secs: Array, *, is_whole: bool) -> NDArray[np.int64]:
        """Add a variable for every finite cost; return their numbers, -1 where infinite."""
        can_be = np.isfinite(secs)
        found = np.full(secs.shape, -1, dtype=np.int64)
        costs = (secs[can_be] * self.per_sec).tolist()
        found[can_be] = self.rows.variables(len(costs), cost=costs, is_whole=is_whole, most=1.0)
        return found

    def _sum(
        self, variables: NDArray[np.int64], value: float, more: Iterable[tuple[int, float]] = ()
    ) -> None:
        """Add a row: the variables (except -1) and the terms of ``more`` add up to ``value``."""
        entries = [(int(x), 1.0) for x in variables if x >= 0]
        self.rows.row([*entries, *more], least=value, most=value)

    def _limit(self, space: Space, memory_bytes: float) -> None:
        """Add rows: what all nodes hold, plus the work memory of any one node, fits in memory."""
        (work,) = self.rows.variables(1).tolist()
        held = [(work, 1.0)]
        for node, variables in self.variables.items():
            can_be = variables >= 0
            mine = variables[can_be].tolist()
            held += zip(mine, space.held_bytes[node][can_be] / memory_bytes, strict=True)
            needs = space.nodes[node].work_bytes[can_be] / memory_bytes
            self.rows.row([(work, -1.0), *zip(mine, needs, strict=True)], most=0.0)
        self.rows.row(held, most=1.0)

    def is_whole(self, values: Array) -> bool:
        """Whether the values of all nodes' choices are whole numbers."""
        mine = np.concatenate([each[each >= 0] for each in self.variables.values()])
        return bool((np.abs(values[mine] - values[mine].round()) <= FULL).all())

    def chosen(self, values: Array) -> dict[int, int]:
        """The choice of every node of the core."""
        return {
            node: int(np.where(each >= 0, values[each], -1.0).argmax())
            for node, each in self.variables.items()
        }


PLANNER = PlannerRow(partial(propose_space, planner=alpa_intra), turn=80)
