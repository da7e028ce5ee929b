"""The graph of the search: which bindings are one step away, and how far the goal is at least.

A state is a binding's targets. Two graphs have one face (``start``, ``is_goal``, ``bound``,
``successors``):

``ThoroughGraph`` is for pairs with few axes that are free to move. It names every step that a
formula prices; tests/planning/test_search.py compares its paths with brute force, and names the
known pairs whose path is dearer.

``LeanGraph`` is for all others, and is a heuristic: it leaves out steps that are seldom needed, so
that few states look equally good (ADR 8 has a pair whose path is 3.3 times dearer for it). What is
free is done at once, and an axis whose goal is V may end anywhere, since a mask from there is free.
Its bound therefore knows more: what V leaves has to be summed, and what is gathered has to be
received, round by round.
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

    Axes may move in any set of ``units``; the fewer ``coarse_units``, if there are any, give a good
    path soon.
    """

    def __init__(self, src: Targets, dst: Targets, pricer: RebindPricer) -> None:
        self.dst, self.pricer = dst, pricer
        self.num_digits = len(pricer.grid.digits)
        self.start = src
        self.units: Units = []
        self.coarse_units: Units = []

    @abstractmethod
    def is_goal(self, state: Targets) -> bool:
        """Whether nothing is left to do but what is free."""

    @abstractmethod
    def bound(self, state: Targets) -> tuple[int, int]:
        """Ticks and rounds that every path from ``state`` to a goal takes at least."""

    @abstractmethod
    def successors(self, state: Targets, units: Units) -> Iterator[Targets]:
        """States one step away that move whole units; their order depends on the axes alone."""

    @staticmethod
    def _subsets(units: Units, may_move: Sequence[bool]) -> Iterator[tuple[int, ...]]:
        """Axes of every set of units all of whose axes may move, in the order of binary numbers."""
        units = [unit for unit in units if all(may_move[a] for a in unit)]
        for chosen in range(1, 1 << len(units)):
            yield tuple(a for i, unit in enumerate(units) if chosen >> i & 1 for a in unit)

    def _size(self, target: int) -> int:
        """Size of a digit; of a scratch digit, 0: it belongs to one axis alone."""
        return self.pricer.grid.digits[target].size if target < self.num_digits else 0

    def _displace(self, state: Targets, changes: Changes, holders: Iterable[int]) -> list[int]:
        """Give holders of a digit that ``changes`` wants one that it leaves, of the same size.

        Returns the holders that found none.
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
        # An axis that keeps a digit has no reason to move; a replica may share work meanwhile, and
        # where there are few axes a part may be summed near by and masked again.
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
        """What any plan must move between groups, and one round."""
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
        # Axes whose goal is V become replicas, all others go to their goals: masks then end it.
        yield {a: R if t == V != state[a] else t for a, t in enumerate(goal)}
        yield dict(enumerate(goal))
        for (a,) in units:
            for digit in range(self.num_digits):
                if self._size(digit) == self.pricer.sizes[a]:
                    yield {a: digit}


# --- many axes ----------------------------------------------------------------------------------


class LeanGraph(Graph):
    """Axes go to their goals, to R or to scratch digits; what is free is done at once.

    An axis is *masked* if it leaves R or a digit for V. Until the mask at the end it shares work
    where it may: as a replica it is cut by its scratch digit, and whoever wants its digit gets it
    for one that it leaves.
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
        """Whether all but masked axes are where they should be."""
        return all(m or s == t for m, s, t in zip(self.is_masked, state, self.dst, strict=True))

    def _alike(self) -> Units:
        """The free axes, those of one level that were and are to be the same in one unit each."""
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
        """By every rule, every set of the axes that it says something new for."""
        goal, scratch = self.dst, self.pricer.grid.scratch
        is_away = [s != t and not m for s, t, m in zip(state, goal, self.is_masked, strict=True)]
        for axes in self._subsets(units, is_away):
            yield from self._fresh(state, self._to_goal(state, axes))
        for axes in self._subsets(
            units, [away and s >= 0 for away, s in zip(is_away, state, strict=True)]
        ):
            # Where all goals are R this is the rule above.
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
        """What is left of the graph's own paths, which is more than any plan needs."""
        return least_of_kept(self.pricer, state, self.dst, self.is_masked)
