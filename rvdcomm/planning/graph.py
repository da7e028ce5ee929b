"""Graphs of the search: the successors of a state, and a lower bound on the rest of a path.

A state is a binding's targets. There are two graphs:

``ThoroughGraph`` is for pairs with few axes that may move. It applies every rule to every set of
these axes. tests/planning/test_search.py compares its paths with brute force, and names the known
pairs whose path costs more than the cheapest.

``LeanGraph`` is for all other pairs, and is a heuristic: it leaves out steps that are seldom
needed, and its search may end early (ADR 8 has a pair whose path costs 3.3 times as much as the
path of a longer search). Steps without cost are taken immediately. An axis whose goal is V may end
in any state, since a mask from there costs nothing. With fewer paths, the bound on the rest of a
path is higher, and the search visits fewer states (docs/bound.md, "In the search").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from rvdcomm.planning.factors import R, V
from rvdcomm.planning.primitives import RebindPricer, Targets
from rvdcomm.planning.search_bound import least_of_any, least_of_kept

MAX_THOROUGH_AXES = 3
"""Up to this many free axes the thorough graph is used; with more axes it takes milliseconds."""

Changes = dict[int, int]
Units = list[tuple[int, ...]]
"""Sets of axes; the axes of one unit move together."""


class TransitionGraph(ABC):
    """The states between the bindings ``src`` and ``dst``; ``pricer`` gives the costs of steps.

    A step moves any set of ``units``. ``coarse_units``, if not empty, are fewer and larger units: a
    first search with them finds a good path quickly.
    """

    def __init__(self, src: Targets, dst: Targets, pricer: RebindPricer) -> None:
        self.dst, self.pricer = dst, pricer
        self.num_digits = len(pricer.grid.digits)
        self.start = src
        self.units: Units = []
        self.coarse_units: Units = []

    @abstractmethod
    def is_goal(self, state: Targets) -> bool:
        """Whether only steps without cost lead from ``state`` to the end of the path."""

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
        """Move ``holders`` away from the digits that ``changes`` binds to other axes.

        They move to digits of equal size that ``changes`` leaves free; these moves are added to
        ``changes``. Returns the holders for which there is no such digit.
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


def graph_between(src: Targets, dst: Targets, pricer: RebindPricer) -> TransitionGraph:
    """The graph for a pair, chosen by the number of axes that are free to move."""
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


class ThoroughGraph(TransitionGraph):
    """The graph for few axes: every rule for every set of free axes, and any axis to any digit."""

    def __init__(self, src: Targets, dst: Targets, pricer: RebindPricer, free: list[int]) -> None:
        super().__init__(src, dst, pricer)
        self.units = [(a,) for a in free]

    def is_goal(self, state: Targets) -> bool:
        """Whether the state is the goal itself."""
        return state == self.dst

    def bound(self, state: Targets) -> tuple[int, int]:
        """The time of the bytes that any plan must move, with one round's latency; and 0 rounds."""
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
        # Axes whose goal is V become replicas, all others go to their goals. A mask then follows.
        yield {a: R if t == V != state[a] else t for a, t in enumerate(goal)}
        yield dict(enumerate(goal))
        for (a,) in units:
            for digit in range(self.num_digits):
                if self._size(digit) == self.pricer.sizes[a]:
                    yield {a: digit}


# --- many axes ----------------------------------------------------------------------------------


class LeanGraph(TransitionGraph):
    """The graph for many axes: axes go to their goals, to R or to scratch digits.

    Slices without cost are taken immediately. An axis is *masked* if its goal is V and it is not V
    in ``src``. The mask is the last step. Before the mask, the axis takes a share of the work: if
    it is R in ``src``, it starts on its scratch digit. If another axis needs the digit of a masked
    axis, the masked axis moves to the digit that the other axis leaves, or to its scratch digit.
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
            # A masked axis moves only if its digit is the goal of some axis.
            if (s >= 0 and s in dst if self.is_masked[a] else s != t or s == R)
        ]
        self.coarse_units = self._alike()

    def is_goal(self, state: Targets) -> bool:
        """Whether all axes that are not masked are at their goals."""
        return all(m or s == t for m, s, t in zip(self.is_masked, state, self.dst, strict=True))

    def _alike(self) -> Units:
        """The free axes as units: one unit per level, role at the start and role at the goal."""
        units: dict[tuple[int, ...], list[int]] = {}
        for (a,) in self.units:
            # All digits count as one role.
            roles = min(self.start[a], 0), min(self.dst[a], 0), int(self.is_masked[a])
            units.setdefault((self.pricer.levels[a], *roles), []).append(a)
        return [tuple(unit) for unit in units.values()]

    def _closed(self, state: Targets) -> Targets:
        """The state after free slices: R axes take their goal's digit if no axis is bound to it."""
        bound = set(state)
        return tuple(
            t if s == R and t >= 0 and t not in bound else s
            for s, t in zip(state, self.dst, strict=True)
        )

    def successors(self, state: Targets, units: Units) -> Iterator[Targets]:
        """Every rule for every set of axes, except where an earlier rule gives the same state."""
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
        """Changes that move the axes to their goals, and masked axes away from these digits."""
        changes = {a: self.dst[a] for a in axes}
        masked = (a for a, is_masked in enumerate(self.is_masked) if is_masked)
        for a in self._displace(state, changes, masked):
            changes[a] = self.pricer.grid.scratch(a)
        return changes

    def _fresh(self, state: Targets, changes: Changes) -> Iterator[Targets]:
        """Yield the state after the changes, unless a digit is bound twice in it."""
        successor = self._closed(_with(state, changes))
        digits = [t for t in successor if t >= 0]
        if len(set(digits)) == len(digits):
            yield successor

    def bound(self, state: Targets) -> tuple[int, int]:
        """A lower bound on the paths of this graph; other plans may cost less."""
        return least_of_kept(self.pricer, state, self.dst, self.is_masked)
