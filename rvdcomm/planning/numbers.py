"""Numbers: mixed-radix numbers over axes of a rank's position, and the pieces they stand for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np

from rvdcomm.layout import Ints
from rvdcomm.planning.binding import BoundAxis
from rvdcomm.planning.digits import Digits

Interval = tuple[int, int]
_Count = TypeVar("_Count", int, Ints)


class Number:
    """A mixed-radix number over axes of a rank's position, most significant axis first.

    ``fixed`` has the values of axes on which all ranks of the group agree, and None for the others.
    """

    def __init__(self, axes: Sequence[BoundAxis], fixed: Sequence[int | None]) -> None:
        self.axes = axes
        self.size = prod(axis.size for axis in axes)
        self.values: Sequence[int] = range(self.size)
        if any(value is not None for value in fixed):
            values = [0]
            for axis, value in zip(axes, fixed, strict=True):
                own = range(axis.size) if value is None else (value,)
                values = [n * axis.size + v for n in values for v in own]
            self.values = values

    def at(self, position: int) -> int:
        """The number of the rank at ``position``."""
        number = 0
        for axis in self.axes:
            number = number * axis.size + position // axis.stride % axis.size
        return number

    def offset(self, number: _Count) -> _Count:
        """The sum that the axes of a number contribute to a rank's position."""
        found = number * 0
        for axis in reversed(self.axes):
            found = found + number % axis.size * axis.stride
            number = number // axis.size
        return found


class Dim:
    """A dim of the view, and the pieces of it that each number stands for.

    ``cuts`` are the cut points of the dim's finest pieces. If all bound digits are coarser than the
    local ones, a number stands for one run of neighbouring pieces, otherwise for several runs.
    """

    def __init__(self, digits: Digits, cuts: Sequence[int], number: Number) -> None:
        self.number, self._cuts, self._digits = number, cuts, digits
        bound = [axis is not None for _, axis in digits]
        self._is_plain = bound == sorted(bound, reverse=True)
        self._num_local = prod(size for size, axis in digits if axis is None)
        self._known: dict[int, list[Interval]] = {}

    def runs(self, number: int) -> list[Interval]:
        """The intervals that a number stands for, none of them empty; adjacent ones are merged."""
        if number not in self._known:
            first, last = number * self._num_local, (number + 1) * self._num_local
            cuts = self._cuts
            pieces = [(cuts[first], cuts[last])] if self._is_plain else self.finest(number)
            found: list[Interval] = []
            for low, high in pieces:
                if found and found[-1][1] == low:
                    found[-1] = found[-1][0], high
                elif low < high:
                    found.append((low, high))
            self._known[number] = found
        return self._known[number]

    @cached_property
    def _bounds(self) -> Ints:
        return np.asarray(self._cuts, np.int64)

    def finest(self, number: int) -> list[Interval]:
        """The finest pieces that a number stands for, ascending; some may be empty."""
        pieces, weight = [0], self.number.size
        for size, axis in self._digits:
            values: Iterable[int] = range(size)
            if axis is not None:
                weight //= size
                values = (number // weight % size,)
            pieces = [piece * size + value for piece in pieces for value in values]
        return [(self._cuts[piece], self._cuts[piece + 1]) for piece in pieces]

    def meeting(self, low: int, high: int) -> Sequence[int]:
        """Numbers whose pieces meet ``[low, high)``, ascending; some of them may be empty."""
        near = range(0)
        if low < high:
            first = max(bisect_right(self._cuts, low) - 1, 0)
            near = range(first, bisect_left(self._cuts, high))
        values = self.number.values
        if not self._is_plain:
            met = set(map(self._number_of, near))
            return [value for value in values if value in met]
        first, last = near.start // self._num_local, -(-near.stop // self._num_local)
        return values[bisect_left(values, first) : bisect_left(values, last)]

    def _number_of(self, piece: int) -> int:
        number, weight = 0, 1
        for size, axis in reversed(self._digits):
            piece, value = divmod(piece, size)
            if axis is not None:
                number += value * weight
                weight *= size
        return number

    def extents(self, numbers: Sequence[int], low: int, high: int) -> Ints:
        """The length of ``[low, high)`` that each number covers."""
        if not self._is_plain:
            clipped = [[min(b, high) - max(a, low) for a, b in self.runs(n)] for n in numbers]
            return np.array([sum(e for e in of_run if e > 0) for of_run in clipped], np.int64)
        first = np.asarray(numbers, np.int64) * self._num_local
        begin, end = self._bounds[first], self._bounds[first + self._num_local]
        found: Ints = np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0)
        return found
