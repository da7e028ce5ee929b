"""Graphs of the search: the states one step away from a state, and a bound on the rest.

A state is a binding's targets. There are two graphs:

``ThoroughGraph`` is for pairs with few axes that may move. It has every step that a formula prices.
tests/planning/test_search.py compares its paths with brute force, and names the known pairs whose
path costs more than the cheapest.

``LeanGraph`` is for all other pairs, and is a heuristic: it leaves out steps that are seldom needed
(ADR 8 has a pair whose path costs 3.3 times as much for that reason). Free steps are taken at once.
An axis whose goal is V may end in any state, since a mask from there is free. With fewer paths, the
bound on the rest of a path is higher, and the search visits fewer states (docs/bound.md, "In the
search").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from rvdcomm.planning.factors import R, V
from rvdcomm.planning.primitives import RebindPricer, Targets
from rvdcomm.planning.search_bound import least_of_any, least_of_kept

MAX_THOROUGH_AXES = 3
"""Up to this many free axes a search is thorough; beyond, that costs milliseconds."""

Changes = dict[int, int]
Units = list[tuple[int, ...]]
"""Axes that move together."""


class Graph(ABC):
    """States between the bindings ``src`` and ``dst``; costs are those of ``pricer``.

    A step moves any set of ``units``. ``coarse_units``, where there are any, are fewer: a first
    search with them finds a good path quickly.
    """

    def __init__(self, src: Targets, dst: Targets, pricer: RebindPricer) -> None:
        self.dst, self.pricer = dst, pricer
        self.num_digits = len(pricer.grid.digits)
        self.start = src
        self.units: Units = []
        self.coarse_units: Units = []

    @abstractmethod
    def is_goal(self, state: Targets) -> bool:
        """Whether only free steps are left."""

    @abstractmethod
    def bound(self, state: Targets) -> tuple[int, int]:
        """A lower bound on the ticks and the rounds of every path from ``state`` to a goal."""

    @abstractmethod
    def successors(self, state: Targets, units: Units) -> Iterator[Targets]:
        """The states one step away, if whole units move; their order depends on the axes alone."""

    @staticmethod
    def _subsets(units: Units, may_move: Sequence[bool]) -> Iterator[tuple[int, ...]]:
        """The axes of every set of units that may move, in the order of binary numbers.

        A unit may move if all its axes may.
        """
        units = [unit for unit in units if all(may_move[a] for a in unit)]
        for chosen in range(1, 1 << len(units)):
            yield tuple(a for i, unit in enumerate(units) if chosen >> i & 1 for a in unit)

    def _size(self, target: int) -> int:
        """Size of a digit; 0 for a scratch digit, which only its own axis can be bound to."""
        return self.pricer.grid.digits[target].size if target < self.num_digits else 0

    def _displace(self, state: Targets, changes: Changes, holders: Iterable[int]) -> list[int]:
        """Move axes away from the digits that ``changes`` binds, to digits of equal size it frees.

        Returns those of ``holders`` for which there is no such digit.
        """
        wanted = {t for t in changes.values() if t >= 0}
        left = [state[a] for a in changes if state[a] >= 0 and state[a] not in wanted]
        homeless = []
        for a in [a for a in holders if a not in changes and state[a] in wanted]:
            free = [t for t in left if self._size(t) == self.pricer.sizes[a]]
            if free:
                changes[a] = free[0]
                left.remove(free[0])
            else:
                homeless.append(a)
        return homeless


def graph_between(src: Targets, dst: Targets, pricer: RebindPricer) -> Graph:
    """The graph for a pair: by the number of axes that are free to move."""
    free = [
        a
        for a, (s, t) in enumerate(zip(src, dst, strict=True))
        # An axis that keeps its digit need not move. An axis that stays R may share the work of a
        # sum in between. With few axes, parts may be summed on a near level and masked again.
        if s != t or s == R or (s == V and len(src) <= MAX_THOROUGH_AXES)
    ]
    if len(free) <= MAX_THOROUGH_AXES:
        return ThoroughGraph(src, dst, pricer, free)
    return LeanGraph(src, dst, pricer)


def _with(state: Targets, changes: Changes) -> Targets:
    return tuple(changes.get(a, t) for a, t in enumerate(state))


# --- few axes -----------------------------------------------------------------------------------


class ThoroughGraph(Graph):
    """Every set of free axes by every rule, and every axis to every digit."""

    def __init__(self, src: Targets, dst: Targets, pricer: RebindPricer, free: list[int]) -> None:
        super().__init__(src, dst, pricer)
        self.units = [(a,) for a in free]

    def is_goal(self, state: Targets) -> bool:
        """Whether the state is the goal itself."""
        return state == self.dst

    def bound(self, state: Targets) -> tuple[int, int]:
        """The bytes that any plan must move between groups, and one round."""
        return least_of_any(self.pricer, state, self.dst), 0

    def successors(self, state: Targets, units: Units) -> Iterator[Targets]:
        """Rules for sets of axes; one step that moves all bytes; single axes to any digit."""
        for changes in self._changes(state, units):
            successor = _with(state, changes)
            if successor != state and self.pricer.is_priced(state, successor):
                yield successor

    def _changes(self, state: Targets, units: Units) -> Iterator[Changes]:
        goal, grid = self.dst, self.pricer.grid
        for axes in self._subsets(units, [True] * len(state)):
            to_goal = {a: goal[a] for a in axes}
            displacing = dict(to_goal)
            if not self._displace(state, displacing, range(len(state))):
                yield displacing
            yield to_goal
            if all(state[a] >= 0 for a in axes):
                yield dict.fromkeys(axes, R)
            if all(state[a] in (R, V) for a in axes):
                yield {a: grid.scratch(a) for a in axes}
        # Axes whose goal is V become replicas, all others go to their goals; a mask is then last.
        yield {a: R if t == V != state[a] else t for a, t in enumerate(goal)}
        yield dict(enumerate(goal))
        for (a,) in units:
            for digit in range(self.num_digits):
                if self._size(digit) == self.pricer.sizes[a]:
                    yield {a: digit}


# --- many axes ----------------------------------------------------------------------------------


class LeanGraph(Graph):
    """Axes go to their goals, to R or to scratch digits; free steps are taken at once.

    An axis is *masked* if its goal is V and it is not V in ``src``. The mask is the last step.
    Before it, the axis takes a share of the work: as a replica it is cut by its scratch digit. If
    another axis needs its digit, it takes the digit that this axis leaves.
    """

    def __init__(self, src: Targets, dst: Targets, pricer: RebindPricer) -> None:
        super().__init__(src, dst, pricer)
        grid, axes = pricer.grid, range(len(src))
        self.is_masked = [dst[a] == V != src[a] for a in axes]
        sliced = {a: grid.scratch(a) for a in axes if self.is_masked[a] and src[a] == R}
        self.start = self._closed(_with(src, sliced))
        self.units = [
            (a,)
            for a, (s, t) in enumerate(zip(self.start, dst, strict=True))
            # A masked axis moves only if its digit is wanted.
            if (s >= 0 and s in dst if self.is_masked[a] else s != t or s == R)
        ]
        self.coarse_units = self._alike()

    def is_goal(self, state: Targets) -> bool:
        """Whether all axes that are not masked are at their goals."""
        return all(m or s == t for m, s, t in zip(self.is_masked, state, self.dst, strict=True))

    def _alike(self) -> Units:
        """The free axes; those of one level with the same start and the same goal are one unit."""
        units: dict[tuple[int, ...], list[int]] = {}
        for (a,) in self.units:
            # Digits are all alike.
            roles = min(self.start[a], 0), min(self.dst[a], 0), int(self.is_masked[a])
            units.setdefault((self.pricer.levels[a], *roles), []).append(a)
        return [tuple(unit) for unit in units.values()]

    def _closed(self, state: Targets) -> Targets:
        """Replicas are sliced by their goal's digit as soon as nobody else is bound to it."""
        bound = set(state)
        return tuple(
            t if s == R and t >= 0 and t not in bound else s
            for s, t in zip(state, self.dst, strict=True)
        )

    def successors(self, state: Targets, units: Units) -> Iterator[Targets]:
        """Every rule, for every set of axes for which no rule before it gives the same state."""
        goal, scratch = self.dst, self.pricer.grid.scratch
        is_away = [s != t and not m for s, t, m in zip(state, goal, self.is_masked, strict=True)]
        for axes in self._subsets(units, is_away):
            yield from self._fresh(state, self._to_goal(state, axes))
        for axes in self._subsets(
            units, [away and s >= 0 for away, s in zip(is_away, state, strict=True)]
        ):
            # If all goals are R, the rule above gives the same state.
            if any(goal[a] != R for a in axes):
                yield from self._fresh(state, dict.fromkeys(axes, R))
        is_free = [s < 0 and not m for s, m in zip(state, self.is_masked, strict=True)]
        for axes in self._subsets(units, is_free):
            yield from self._fresh(state, {a: scratch(a) for a in axes})
        for axes in self._subsets(
            units, [m and s != V for s, m in zip(state, self.is_masked, strict=True)]
        ):
            yield _with(state, dict.fromkeys(axes, V))

    def _to_goal(self, state: Targets, axes: tuple[int, ...]) -> Changes:
        """The axes go to their goals; masked axes make way."""
        changes = {a: self.dst[a] for a in axes}
        masked = (a for a, is_masked in enumerate(self.is_masked) if is_masked)
        for a in self._displace(state, changes, masked):
            changes[a] = self.pricer.grid.scratch(a)
        return changes

    def _fresh(self, state: Targets, changes: Changes) -> Iterator[Targets]:
        """The state that the changes make, if no digit is bound twice."""
        successor = self._closed(_with(state, changes))
        digits = [t for t in successor if t >= 0]
        if len(set(digits)) == len(digits):
            yield successor

    def bound(self, state: Targets) -> tuple[int, int]:
        """A bound on the paths of this graph; other plans may take less."""
        return least_of_kept(self.pricer, state, self.dst, self.is_masked)
