"""Chains: the best chains of stages from any point of a model to its end.

The dynamic programmes of this folder share this recursion. The best way to run the layers from
point p on d devices is a first stage, followed by the best way to run the remaining layers on the
remaining devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from superscaler_core.published.stages.candidates import Candidates
from superscaler_core.published.stages.problem import Array

Chosen = tuple[int, int, int]
"""A stage: the points where it starts and ends, and the number of its choice of devices."""


@dataclass(frozen=True, eq=False)
class Chains:
    """The best chains of stages, by number of stages, first point, and number of devices.

    Law (tests/superscaler_core/published/stages): ``best`` is the least value of all possible
    chains, and the stages of ``least`` have that value.

    Time and memory: with L levels (numbers of stages that are told apart), P points, N sizes of
    stages and D devices, at most ``L P**2 N D`` steps and ``L P D`` numbers. L is 1 where memory
    limits no stage.

    Attributes:
        candidates: the possible stages.
        values: what each stage adds to a chain's value, ``[p, q, c]``; infinite where it is not
            allowed.
        num_devices: the most devices of a whole chain.
        by_max: whether the value of a chain is the largest value of its stages, instead of their
            sum.
        fade: with ``by_max``, what the value of a chain loses for every stage in front of it.
        longest: the most stages of a chain. If it is given, every number of stages is a level.
        may_lead: function from the number of stages of a chain to whether each stage may be its
            first, ``[p, q, c]``, besides the condition of memory; memory alone decides if None.
    """

    candidates: Candidates
    values: Array
    num_devices: int
    by_max: bool = False
    fade: float = 0.0
    longest: int | None = None
    may_lead: Callable[[int], NDArray[np.bool_]] | None = None

    @cached_property
    def num_levels(self) -> int:
        """How many levels there are; without ``longest`` the last stands for all larger numbers."""
        num_layers = self.candidates.points[-1].bit_count()
        longest = max(1, min(num_layers, self.num_devices // min(self.candidates.sizes)))
        if self.longest is not None:
            return min(longest, self.longest)
        most = self.candidates.most_behind[np.isfinite(self.values)]
        limits = most[most < longest - 1]
        return min(int(limits.max(initial=-1)) + 2, longest)

    def cost(self, level: int) -> Array:
        """The values of stages as the first of a chain of ``level`` stages, ``[p, q, c]``."""
        may_lead = self.candidates.most_behind >= level - 1
        if self.may_lead is not None:
            may_lead &= self.may_lead(level)
        return np.where(may_lead, self.values, np.inf)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The distinct numbers of devices that a stage may have, ascending."""
        return tuple(sorted({n for n in self.candidates.sizes if n <= self.num_devices}))

    @cached_property
    def _costs(self) -> Array:
        """The best value of all choices of a size, ``[level, p, q, size]``; level 0 is unused."""
        of_size = [[c for c, n in enumerate(self.candidates.sizes) if n == m] for m in self.sizes]
        num = len(self.candidates.points)
        found = np.full((self.num_levels + 1, num, num, len(self.sizes)), np.inf)
        for level in range(1, self.num_levels + 1):
            cost = self.cost(level)
            for number, choices in enumerate(of_size):
                found[level, :, :, number] = cost[:, :, choices].min(axis=2)
        return found

    @cached_property
    def best(self) -> Array:
        """The least value of a chain of s stages on exactly d devices, from p on: ``[s, p, d]``.

        Without ``longest``, the last s stands for s stages or more.
        """
        costs, num = self._costs, len(self.candidates.points)
        shape = self.num_levels + 1, num, self.num_devices + 1
        best = np.full(shape, np.inf)
        best[0, num - 1, 0] = 0.0
        # The least values behind a first stage, by the level of the whole chain.
        rest = np.full(shape, np.inf)
        self._note(best, rest, num - 1)
        for start in range(num - 2, -1, -1):
            for number, size in enumerate(self.sizes):
                cost = costs[1:, start, :, number]
                (ends,) = np.nonzero(np.isfinite(cost).any(axis=0))
                if not len(ends):
                    continue
                behind = rest[1:, ends, : self.num_devices + 1 - size]
                values = self._joined(cost[:, ends, None], behind).min(axis=1)
                np.minimum(best[1:, start, size:], values, out=best[1:, start, size:])
            self._note(best, rest, start)
        return best

    def _joined(self, first: Array, behind: Array) -> Array:
        """The values of chains, from those of their first stages and of the chains behind these."""
        joined = np.maximum(first, behind - self.fade) if self.by_max else first + behind
        return np.asarray(joined)

    def _note(self, best: Array, rest: Array, point: int) -> None:
        rest[1:, point] = best[:-1, point]
        if self.longest is None:
            # A chain of the last level may be longer, so its rest may be of that level too.
            rest[-1, point] = np.minimum(best[-2, point], best[-1, point])

    def least(
        self, *, start: int = 0, num_stages: int | None = None, on_all: bool = False
    ) -> tuple[float, list[Chosen]]:
        """The least value of a chain from a point to the end, and its stages.

        Args:
            start: number of the point.
            num_stages: stages of the chain; any number if None. Only with ``longest``.
            on_all: whether the chain uses all devices, instead of any number of them.

        Returns:
            Infinity and no stages if there is no such chain.
        """
        found = self.best[:, start].copy()
        found[0] = np.inf
        if on_all:
            found[:, :-1] = np.inf
        if num_stages is not None:
            found[np.arange(len(found)) != num_stages] = np.inf
        level, devices = map(int, np.unravel_index(np.argmin(found), found.shape))
        value = float(found[level, devices])
        return value, list(self._walk(start, level, devices)) if np.isfinite(value) else []

    def _walk(self, start: int, level: int, devices: int) -> Iterator[Chosen]:
        """The stages of the best chain from a point to the end."""
        end = len(self.candidates.points) - 1
        while start != end:
            value = self.best[level, start, devices]
            start, level, devices, chosen = next(self._firsts(level, start, devices, value))
            yield chosen

    def _firsts(
        self, level: int, start: int, devices: int, value: float
    ) -> Iterator[tuple[int, int, int, Chosen]]:
        """The possible first stages of a best chain, each with the state after it."""
        cost = self.cost(level)[start]
        is_last = level == self.num_levels and self.longest is None
        for choice, size in enumerate(self.candidates.sizes):
            if size > devices:
                continue
            for before in (level - 1, level) if is_last else (level - 1,):
                found: NDArray[np.bool_] = (
                    self._joined(cost[:, choice], self.best[before, :, devices - size]) == value
                )
                for q in np.flatnonzero(found).tolist():
                    yield q, before, devices - size, (start, q, choice)
