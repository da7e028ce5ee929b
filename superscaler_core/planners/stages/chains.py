"""Chains: the best chains of stages from any point of a model to its end.

This is the recursion that the dynamic programmes of this folder share. The best way to run the
layers from point p on d devices is a first stage, and the best way to run the rest on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from superscaler_core.planners.stages.candidates import Candidates
from superscaler_core.planners.stages.problem import Array

Chosen = tuple[int, int, int]
"""A stage: the points where it starts and ends, and the number of its choice of devices."""


@dataclass(frozen=True, eq=False)
class Chains:
    """The best chains of stages, by their number of stages, where they start, and their devices.

    Law (tests/superscaler_core/planners/stages): ``best`` is the least value of all
    chains that exist, and the stages of ``least`` have that value.

    Time and memory: with L levels, P points, N sizes of stages and D devices, at most
    ``L P**2 N D`` steps and ``L P D`` numbers. L is 1 where memory limits no stage.

    Attributes:
        candidates: the stages that may be.
        values: what each adds to a chain, ``[p, q, c]``; infinite where it may not be.
        num_devices: those of a whole chain at most.
        by_max: whether a chain's value is its largest instead of the sum.
        fade: what a chain's value loses by every stage in front of it, where ``by_max``.
        longest: if given, chains of all numbers of stages up to it are told apart, and there are no
            longer ones.
        may_lead: from the number of stages of a chain to whether a stage may be its first, ``[p,
            q, c]``; memory alone decides if None.
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
        """Numbers of stages that are told apart; the last of them stands for all larger ones."""
        num_layers = self.candidates.points[-1].bit_count()
        longest = max(1, min(num_layers, self.num_devices // min(self.candidates.sizes)))
        if self.longest is not None:
            return min(longest, self.longest)
        most = self.candidates.most_behind[np.isfinite(self.values)]
        limits = most[most < longest - 1]
        return min(int(limits.max(initial=-1)) + 2, longest)

    def cost(self, level: int) -> Array:
        """The values of stages that are the first of so many, ``[p, q, c]``."""
        may_lead = self.candidates.most_behind >= level - 1
        if self.may_lead is not None:
            may_lead &= self.may_lead(level)
        return np.where(may_lead, self.values, np.inf)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The different numbers of devices of a stage."""
        return tuple(sorted({n for n in self.candidates.sizes if n <= self.num_devices}))

    @cached_property
    def _costs(self) -> Array:
        """The best value of any choice of a size, ``[level, p, q, size]``; level 0 is unused."""
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
        """The least value of a chain of s stages, from p to the end, on d devices: ``[s, p, d]``.

        The last s stands for that many stages and more.
        """
        costs, num = self._costs, len(self.candidates.points)
        shape = self.num_levels + 1, num, self.num_devices + 1
        best = np.full(shape, np.inf)
        best[0, num - 1, 0] = 0.0
        # What the rest after a first stage may be, if the whole chain is of a level.
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
        """The values of chains from those of their first stages and of what is behind."""
        joined = np.maximum(first, behind - self.fade) if self.by_max else first + behind
        return np.asarray(joined)

    def _note(self, best: Array, rest: Array, point: int) -> None:
        rest[1:, point] = best[:-1, point]
        if self.longest is None:
            # The last level has as many stages as it counts, or more.
            rest[-1, point] = np.minimum(best[-2, point], best[-1, point])

    def least(
        self, *, start: int = 0, num_stages: int | None = None, on_all: bool = False
    ) -> tuple[float, list[Chosen]]:
        """The least value of a chain from a point to the end, and its stages.

        Args:
            start: number of the point.
            num_stages: how many; any number if None. Only with ``longest``.
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
        """The stages of the chain that ``best`` has from a point on."""
        end = len(self.candidates.points) - 1
        while start != end:
            value = self.best[level, start, devices]
            start, level, devices, chosen = next(self._firsts(level, start, devices, value))
            yield chosen

    def _firsts(
        self, level: int, start: int, devices: int, value: float
    ) -> Iterator[tuple[int, int, int, Chosen]]:
        """First stages of a best chain: where it goes on, and the stage."""
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
