"""Candidates: all possible stages between two points of a model, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from superscaler_core.published.stages.problem import Array, StageProblem

UNLIMITED = 1 << 30
"""Number of stages behind a stage if memory sets no limit."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The possible stages, for points ``p`` before ``q`` and every choice ``c`` of devices.

    Attributes:
        points: sets of layers, as bits; a stage has the layers of ``q`` that ``p`` lacks.
        sizes: the number of devices of every choice.
        secs: seconds per microbatch, ``[p, q, c]``; infinite where no stage is possible.
        most_behind: the most stages that may come after the stage before memory is short,
            ``[p, q, c]``; -1 where it never fits.
    """

    points: tuple[int, ...]
    sizes: tuple[int, ...]
    secs: Array
    most_behind: NDArray[np.int64]

    @classmethod
    def of(cls, problem: StageProblem, points: Sequence[int]) -> Candidates:
        """The candidates of a problem; time and held bytes of a stage are sums over its layers."""
        secs, rest, kept = (
            sums(problem, points, name) for name in ("secs", "resting_bytes", "kept_bytes")
        )
        free = problem.memory_bytes - rest - _most(problem, points, "work_bytes")
        free[~_can_be(problem, points)] = -1
        sizes = tuple(each.num_devices for each in problem.degrees)
        return cls.within(tuple(points), sizes, secs, free, kept, problem.microbatches)

    @classmethod
    def within(
        cls,
        points: tuple[int, ...],
        sizes: tuple[int, ...],
        secs: Array,
        free: Array,
        kept: Array,
        microbatches: int,
    ) -> Candidates:
        """The candidates with the numbers of stages behind them that memory allows.

        A stage keeps a microbatch for each stage from it to the last, and at most all.

        Args:
            points, sizes, secs: as the attributes; ``secs`` is changed.
            free: bytes of memory for kept microbatches, ``[p, q, c]``; below 0 for no stage.
            kept: bytes that a microbatch keeps, ``[p, q, c]``.
            microbatches: microbatches in a step.
        """
        # A stage that keeps nothing fits with any number of microbatches, or with none.
        most = np.where(kept > 0, free / np.where(kept > 0, kept, 1.0), np.inf)
        in_flight = np.where(most >= microbatches, UNLIMITED + 1.0, np.floor(most))
        in_flight[free < 0] = 0
        most_behind = in_flight.astype(np.int64) - 1
        secs[most_behind < 0] = np.inf
        return cls(points, sizes, secs, most_behind)

    def layers(self, start: int, end: int) -> tuple[int, ...]:
        """The layers between two points."""
        left = self.points[end] & ~self.points[start]
        return tuple(i for i in range(left.bit_length()) if left >> i & 1)

    def until(self, end: int) -> Candidates:
        """The candidates of the model that ends at a point of a chain."""
        points = slice(0, end + 1)
        secs, most_behind = self.secs[points, points], self.most_behind[points, points]
        return Candidates(self.points[points], self.sizes, secs, most_behind)

    def crossing_bytes(self, problem: StageProblem) -> tuple[Array, Array]:
        """The bytes of a microbatch that enter and leave each stage, ``[p, q]``."""
        entering, leaving = (np.zeros(self.secs.shape[:2]) for _ in range(2))
        for p, q in np.argwhere(np.isfinite(self.secs).any(axis=2)).tolist():
            layers = self.points[q] & ~self.points[p]
            entering[p, q], leaving[p, q] = problem.crossing_bytes(layers)
        return entering, leaving

    def weight_bytes(self, problem: StageProblem) -> Array:
        """The bytes of each stage's parameters before any split, ``[p, q]``."""
        of_layers = np.array([layer.weight_bytes for layer in problem.layers])
        before = _members(problem, self.points) @ of_layers
        return np.asarray(before[None, :] - before[:, None])


def _members(problem: StageProblem, points: Sequence[int]) -> Array:
    """Whether a layer is in the set of a point, ``[point, layer]``."""
    layers = range(len(problem.layers))
    return np.array([[each >> i & 1 for i in layers] for each in points], dtype=float)


def _can_be(problem: StageProblem, points: Sequence[int]) -> NDArray[np.bool_]:
    """Whether p is before q, and all layers between them have a cost, ``[p, q, c]``."""
    rising = [[p & q == p and p != q for q in points] for p in points]
    missing = _members(problem, points) @ np.isinf(problem.table("secs"))
    can_be = np.array(rising)[:, :, None] & (missing[None, :] == missing[:, None])
    return np.asarray(can_be, dtype=bool)


def sums(problem: StageProblem, points: Sequence[int], attribute: str) -> Array:
    """Sums over the layers between two points, ``[p, q, c]``; layers without a cost add nothing."""
    costs = problem.table(attribute)
    before = _members(problem, points) @ np.where(np.isinf(costs), 0.0, costs)
    return np.asarray(before[None, :] - before[:, None])


def _most(problem: StageProblem, points: Sequence[int], attribute: str) -> Array:
    """The largest value of the layers between two points, ``[p, q, c]``."""
    costs, members = problem.table(attribute), _members(problem, points) > 0
    costs[np.isinf(costs)] = 0.0
    found = np.zeros((len(points), len(points), len(problem.degrees)))
    for layer, row in enumerate(costs):
        inside = members[None, :, layer] & ~members[:, None, layer]
        found[inside] = np.maximum(found[inside], row)
    return found
