"""Cells: what one rank holds, and which ranks hold part of a box, computed by arithmetic.

A placement lists what every rank holds. ``Cells`` computes this from a layout or a binding, for one
rank or one box, in a time that does not grow with the number of ranks. It covers one group of
ranks: all ranks, or those that differ from a given rank only in some *free* axes of a binding.

A *key* has one number for every dim (``numbers.py``); ranks with equal keys hold the same boxes.
Boxes are of a *view* of the tensor. A view splits dims into digits, so that a region that is
strided in the tensor is one box of the view (docs/program.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from rvdcomm.layout import Box, Ints, Layout, View, balanced_cuts, merged
from rvdcomm.planning.binding import Binding, BoundAxis, Source
from rvdcomm.planning.digits import numbers_of, segments
from rvdcomm.planning.numbers import Dim, Number

Key = tuple[int, ...]


class Cells:
    """The cells of one group: the ranks that differ from ``base`` in the ``free`` axes alone.

    All ranks are one group if ``free`` is None. Boxes are of ``view``, or of the tensor if None.

    Law (tests/planning/test_cells.py): within the group, these are the cells of the placement.
    """

    def __init__(
        self,
        source: Source,
        base: int = 0,
        free: frozenset[int] | None = None,
        view: View | None = None,
    ) -> None:
        self._source = source
        self.ranks = source.ranks
        """The ranks of all groups, in the order of their positions."""
        self.position = source.position
        """The function from a rank to its index in ``ranks``."""
        view = view or View.whole(source.shape)
        replicas, parts, digits, flat = numbers_of(source)
        at = 0 if free is None else self.position(base)
        strides = _free_strides(source, free)

        def number(axes: Sequence[BoundAxis]) -> Number:
            fixed = [
                None if strides is None or any(a <= axis.stride < b for a, b in strides)
                else at // axis.stride % axis.size
                for axis in axes
            ]  # fmt: skip
            return Number(axes, fixed)

        self._parts, self._replicas = number(parts), number(replicas)
        self._flat = number(flat)
        self._dims = []
        for of_dim, sizes, cuts in zip(digits, view.parts, source.cuts, strict=True):
            for part, size in zip(segments(of_dim, sizes), sizes, strict=True):
                num_pieces = prod(count for count, _ in part)
                is_given = len(sizes) == 1 and num_pieces == len(cuts) - 1
                own = cuts if is_given else range(0, size + 1, size // num_pieces)
                self._dims.append(Dim(part, own, number([axis for _, axis in part if axis])))
        self.num_replicas = len(self._replicas.values)
        self.parts = self._parts.values
        """The value parts that ranks of the group hold, ascending."""
        self._known_boxes: dict[Key, tuple[Box, ...]] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._source

    @property
    def is_regular(self) -> bool:
        """Whether every dim is cut independently of the others, without flat cuts."""
        return not self._flat.axes

    def key(self, rank: int) -> Key:
        """The key of the cell that ``rank`` holds."""
        position = self.position(rank)
        key = tuple([dim.number.at(position) for dim in self._dims])
        return (*key, self._flat.at(position)) if self._flat.axes else key

    def part(self, rank: int) -> int:
        """The value part that ``rank`` holds."""
        return self._parts.at(self.position(rank))

    def boxes(self, key: Key) -> tuple[Box, ...]:
        """The boxes of a cell, none of them empty, in the order in which they lie in memory."""
        if self._flat.axes:
            if key not in self._known_boxes:
                self._known_boxes[key] = self._flat_boxes(key)
            return self._known_boxes[key]
        runs = product(*[dim.runs(n) for dim, n in zip(self._dims, key, strict=True)])
        return tuple(
            [Box(tuple([a for a, _ in chosen]), tuple([b for _, b in chosen])) for chosen in runs]
        )

    def holders(self, key: Key, part: int) -> tuple[int, ...]:
        """The ranks of the group that hold this part of a cell, ascending."""
        first = self._offset(key) + self._parts.offset(part)
        ranks = self.ranks
        return tuple(sorted([ranks[first + more] for more in self._replica_offsets.tolist()]))

    def overlaps(self, box: Box) -> Iterator[tuple[Key, Box]]:
        """Yield (key, common box) of the cells that overlap ``box``, in ascending order of keys."""
        if self._flat.axes:
            for key in self.meeting(box):
                common = (theirs.intersect(box) for theirs in self.boxes(key))
                yield from ((key, each) for each in common if each is not None)
            return
        dims = [
            [
                (n, low if low > a else a, high if high < b else b)
                for n in dim.meeting(low, high)
                for a, b in dim.runs(n)
                if a < high and b > low
            ]
            for dim, low, high in zip(self._dims, box.lo, box.hi, strict=True)
        ]
        for chosen in product(*dims):
            numbers, lo, hi = zip(*chosen, strict=True) if chosen else ((), (), ())
            yield numbers, Box(lo, hi)

    @property
    def num_keys(self) -> int:
        """Number of cells of all groups."""
        return prod(dim.number.size for dim in self._dims) * self._flat.size

    def all_keys(self) -> Iterator[Key]:
        """All cells of the group, ascending; some may be empty."""
        flat = [self._flat.values] if self._flat.axes else []
        return product(*(dim.number.values for dim in self._dims), *flat)

    def meeting(self, box: Box) -> Iterator[Key]:
        """A superset of the cells that have elements of ``box``, ascending; some may be empty."""
        dims = zip(self._dims, box.lo, box.hi, strict=True)
        met = [dim.meeting(low, high) for dim, low, high in dims]
        return product(*met, *([self._flat.values] if self._flat.axes else []))

    def equal_shares(self, box: Box) -> list[Sequence[int]] | None:
        """The cells that overlap ``box``, as numbers per dim; None unless their shares are equal.

        The cells are all combinations of these numbers, in ascending order.
        """
        found = []
        for dim, low, high in zip(self._dims, box.lo, box.hi, strict=True):
            numbers = dim.meeting(low, high)
            extents = dim.extents(numbers, low, high)
            if extents.min() < extents.max() or extents.min() == 0:
                return None
            found.append(numbers)
        return found if self.is_regular else None

    def readers(self, box: Box, part: int) -> tuple[Ints, Ints]:
        """Ranks that hold this part of some of ``box``, ascending, and the elements of it in each.

        The cells must be ``is_regular``.
        """
        positions = np.array([self._parts.offset(part)])
        counts = np.ones(1, np.int64)
        for dim, low, high in zip(self._dims, box.lo, box.hi, strict=True):
            numbers = dim.meeting(low, high)
            offsets = dim.number.offset(np.asarray(numbers, np.int64))
            positions = np.add.outer(positions, offsets).ravel()
            counts = np.multiply.outer(counts, dim.extents(numbers, low, high)).ravel()
        positions, counts = positions[counts > 0], counts[counts > 0]
        ranks = self._ranks[np.add.outer(positions, self._replica_offsets).ravel()]
        order = np.argsort(ranks, kind="stable")
        return ranks[order], np.repeat(counts, self.num_replicas)[order]

    @cached_property
    def _replica_offsets(self) -> Ints:
        return self._replicas.offset(np.array(self._replicas.values, np.int64))

    @cached_property
    def _ranks(self) -> Ints:
        return np.array(self.ranks, np.int64)

    def _offset(self, key: Key) -> int:
        """The position of a rank with this key whose other coordinates are all 0."""
        found = sum(dim.number.offset(n) for dim, n in zip(self._dims, key, strict=False))
        return found + self._flat.offset(key[-1]) if self._flat.axes else found

    def _flat_boxes(self, key: Key) -> tuple[Box, ...]:
        """The boxes of a cell, if scratch digits cut every finest box in row-major order."""
        source = self._source
        assert isinstance(source, Binding), "a layout has no scratch digits"
        bound, position = set(self._flat.axes), self._flat.offset(key[-1])
        axes = [source.grid.axes[a] for a in source.scratch_order]
        own = [position // axis.stride % axis.size if axis in bound else None for axis in axes]
        scratch = Number(axes, own)
        found = []
        for spans in product(*(dim.finest(n) for dim, n in zip(self._dims, key, strict=False))):
            atom = Box(tuple(low for low, _ in spans), tuple(high for _, high in spans))
            cuts = balanced_cuts(atom.num_elements, scratch.size)
            found += [box for i in scratch.values for box in atom.flat_range(cuts[i], cuts[i + 1])]
        return merged(found)


def _free_strides(source: Source, free: frozenset[int] | None) -> list[tuple[int, int]] | None:
    """Ranges of strides of the free axes; None if all are free."""
    if free is None or isinstance(source, Layout):
        return None
    axes = [source.grid.axes[a] for a in free]
    return [(axis.stride, axis.stride * axis.size) for axis in axes]
