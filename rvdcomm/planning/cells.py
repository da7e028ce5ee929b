"""Cells: who holds what, asked about one rank or one box and answered by arithmetic.

A placement lists what every rank holds. Here the same facts of a layout or of a binding are
computed for what is asked: the time does not grow with the number of ranks. Ranks are those of one
group: all ranks, or those that differ from a given rank only in some *free* axes of a binding.

A *key* names the boxes of a cell; ranks with equal keys hold the same boxes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Protocol

from rvdcomm.layout import Box, Cuts, Layout
from rvdcomm.planning.binding import Binding, R, V

Key = tuple[int, ...]


class Cells(Protocol):
    """The cells of one group of ranks.

    Law (tests/planning/test_cells.py): they are those of the placement, within the group.
    """

    parts: Sequence[int]
    """The value parts that ranks of the group hold, ascending."""

    def __contains__(self, rank: int) -> bool:
        """Whether ``rank`` holds anything."""

    def key(self, rank: int) -> Key:
        """Which boxes ``rank`` holds."""

    def part(self, rank: int) -> int:
        """The value part that ``rank`` holds."""

    def boxes(self, key: Key) -> tuple[Box, ...]:
        """The boxes of a cell, none of them empty, in the order in which they lie in memory."""

    def holders(self, key: Key, part: int) -> tuple[int, ...]:
        """The ranks of the group that hold this part of a cell, ascending."""

    def meeting(self, box: Box) -> Iterator[Key]:
        """All cells that have elements of ``box``, and maybe others, in ascending order.

        Some of the others may be empty.
        """


def cells_of(source: Layout | Binding, rank: int, free: frozenset[int] | None = None) -> Cells:
    """The cells of the group of ``rank``: ranks that differ from it in the ``free`` axes alone.

    All ranks are one group if ``free`` is None.
    """
    if isinstance(source, Layout):
        return LayoutCells(source)
    return BindingCells(source, rank, free)


class LayoutCells:
    """The cells of a layout; a key is the index of the split along every dim."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.parts: Sequence[int] = range(layout.rvd.v)
        self._num_boxes = prod(layout.rvd.d)

    def __contains__(self, rank: int) -> bool:
        return rank in self.layout

    def key(self, rank: int) -> Key:
        rest = self.layout.position(rank) % self._num_boxes
        key = []
        for count in reversed(self.layout.rvd.d):
            rest, index = divmod(rest, count)
            key.append(index)
        return tuple(reversed(key))

    def part(self, rank: int) -> int:
        return self.layout.position(rank) // self._num_boxes % self.layout.rvd.v

    def boxes(self, key: Key) -> tuple[Box, ...]:
        box = self.layout.box(key)
        return () if box.is_empty else (box,)

    def holders(self, key: Key, part: int) -> tuple[int, ...]:
        index = 0
        for i, count in zip(key, self.layout.rvd.d, strict=True):
            index = index * count + i
        step = self._num_boxes * self.layout.rvd.v
        return tuple(sorted(self.layout.ranks[part * self._num_boxes + index :: step]))

    def meeting(self, box: Box) -> Iterator[Key]:
        dims = zip(self.layout.cuts, box.lo, box.hi, strict=True)
        return product(*(_pieces(cut, low, high) for cut, low, high in dims))


class BindingCells:
    """The cells of a binding in one group; a key has the coordinates of the axes that cut.

    ``base`` is a rank of the group; its coordinates of axes that are not ``free`` are everybody's.
    """

    def __init__(self, binding: Binding, base: int, free: frozenset[int] | None) -> None:
        self.binding, grid = binding, binding.grid
        everything = frozenset(range(len(grid.axes)))
        self._fixed = everything - (everything if free is None else free)
        at = grid.coordinates(grid.position(base)) if self._fixed else ()
        targets = binding.targets
        self._bound = tuple(a for a, t in enumerate(targets) if t >= 0)
        self._choices = {
            a: (at[a],) if a in self._fixed else range(axis.size)
            for a, axis in enumerate(grid.axes)
        }
        self._axis_of = {targets[a]: i for i, a in enumerate(self._bound)}
        self._part_axes = tuple(a for a, t in enumerate(targets) if t == V)
        self._part_offset = {
            self._part_of(coords): self._offset(self._part_axes, coords)
            for coords in product(*(self._choices[a] for a in self._part_axes))
        }
        self.parts: Sequence[int] = sorted(self._part_offset)
        replicas = tuple(a for a, t in enumerate(targets) if t == R)
        self._replica_offsets = [
            self._offset(replicas, coords)
            for coords in product(*(self._choices[a] for a in replicas))
        ]
        self._boxes: dict[Key, tuple[Box, ...]] = {}

    def __contains__(self, rank: int) -> bool:
        return self.binding.grid.holds(rank)

    def key(self, rank: int) -> Key:
        at = self.binding.grid.coordinates(self.binding.grid.position(rank))
        return tuple(at[a] for a in self._bound)

    def part(self, rank: int) -> int:
        at = self.binding.grid.coordinates(self.binding.grid.position(rank))
        return self._part_of([at[a] for a in self._part_axes])

    def boxes(self, key: Key) -> tuple[Box, ...]:
        found = self._boxes.get(key)
        if found is None:
            value = {self.binding.targets[a]: c for a, c in zip(self._bound, key, strict=True)}
            found = self._boxes[key] = self.binding.boxes(value)
        return found

    def holders(self, key: Key, part: int) -> tuple[int, ...]:
        grid = self.binding.grid
        first = self._offset(self._bound, key) + self._part_offset[part]
        return tuple(sorted([grid.ranks[first + more] for more in self._replica_offsets]))

    def meeting(self, box: Box) -> Iterator[Key]:
        """As of ``Cells``; of scratch cuts every one is named, whether it meets ``box`` or not."""
        grid, bound = self.binding.grid, self._bound
        digits_of_dim: list[list[int]] = []
        values_of_dim: list[list[Key]] = []
        for d in range(len(grid.shape)):
            digits_of_dim.append([i for i in grid.digit_values(d) if i in self._axis_of])
            values_of_dim.append(self._digit_values(d, box.lo[d], box.hi[d], digits_of_dim[d]))
        places = [self._axis_of[i] for digits in digits_of_dim for i in digits]
        scratch = [i for i, a in enumerate(bound) if self.binding.targets[a] == grid.scratch(a)]
        others = [self._choices[bound[i]] for i in scratch]
        order = [*places, *scratch]
        found = []
        for values in product(*values_of_dim):
            in_dims = [v for of_dim in values for v in of_dim]
            for rest in product(*others):
                key = [0] * len(bound)
                for i, v in zip(order, (*in_dims, *rest), strict=True):
                    key[i] = v
                found.append(tuple(key))
        return iter(sorted(found))

    def _digit_values(self, d: int, low: int, high: int, digits: Sequence[int]) -> list[Key]:
        """Values of the bound digits of dim ``d`` in the pieces that meet ``[low, high)``."""
        grid, bound = self.binding.grid, self._bound
        if not digits:
            return [()] if low < high else []
        weights = []
        rest = 1
        for i in reversed(grid.digit_values(d)):
            weights.append((i, rest, grid.digits[i].size))
            rest *= grid.digits[i].size
        taken = [(w, k) for i, w, k in reversed(weights) if i in self._axis_of]
        allowed = [self._choices[bound[self._axis_of[i]]] for i in digits]
        values = dict.fromkeys(
            tuple(p // w % k for w, k in taken) for p in _pieces(grid.cuts[d], low, high)
        )
        return [v for v in values if all(c in ok for c, ok in zip(v, allowed, strict=True))]

    def _offset(self, axes: Sequence[int], coords: Sequence[int]) -> int:
        """What these coordinates, and those of no other axis, add to a position."""
        grid = self.binding.grid
        return sum(grid.axes[a].stride * c for a, c in zip(axes, coords, strict=True))

    def _part_of(self, coords: Sequence[int]) -> int:
        part = 0
        for a, c in zip(self._part_axes, coords, strict=True):
            part = part * self.binding.grid.axes[a].size + c
        return part


def _pieces(cut: Sequence[int], low: int, high: int) -> range:
    """Indices of the pieces between ``cut`` points that may meet ``[low, high)``."""
    return (
        range(max(bisect_right(cut, low) - 1, 0), bisect_left(cut, high))
        if low < high
        else range(0)
    )


class CommonBlocks:
    """Blocks: boxes that no cell of either side crosses, so that no byte moves between them."""

    def __init__(self, src: Cuts, dst: Cuts) -> None:
        self.cuts = tuple(sorted({*a} & {*b}) for a, b in zip(src, dst, strict=True))

    def around(self, box: Box) -> Box:
        """The block that holds ``box``, which is not empty."""
        spans = [
            (cut[bisect_right(cut, low) - 1], cut[bisect_left(cut, high)])
            for cut, low, high in zip(self.cuts, box.lo, box.hi, strict=True)
        ]
        return Box(tuple(low for low, _ in spans), tuple(high for _, high in spans))
