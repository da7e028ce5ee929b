"""Cells: who holds what, asked about one rank or one box and answered by arithmetic.

A placement lists what every rank holds. Here the same facts of a layout or of a binding are
computed for what is asked: the time does not grow with the number of ranks. Ranks are those of one
group: all ranks, or those that differ from a given rank only in some *free* axes of a binding.

A rank's position is a mixed-radix number over axes. Its value part, its replica, and the piece that
it holds along every dim are numbers over some of these axes each. A *key* has the numbers of all
dims; ranks with equal keys hold the same boxes.

Boxes are of a *view* of the tensor (``view_of``): a cell that is strided in the tensor is one box
of a view whose dims are the digits that it fixes, and those that it does not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rvdcomm.layout import MAX_DIMS, Box, Cuts, Layout, View
from rvdcomm.planning.binding import Axis, Binding, R, V

Key = tuple[int, ...]
Interval = tuple[int, int]
Ints = NDArray[np.int64]
_Count = TypeVar("_Count", int, Ints)

_Digits = list[tuple[int, Axis | None]]
"""Sizes of a dim's digits, coarsest first, with the axes that they are bound to."""


class Number:
    """A mixed-radix number over axes of a rank's position, most significant axis first.

    ``fixed`` are the values of axes on which all ranks of the group agree.
    """

    def __init__(self, axes: Sequence[Axis], fixed: Sequence[int | None]) -> None:
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
        """What the axes of a number add to a position."""
        found = number * 0
        for axis in reversed(self.axes):
            found = found + number % axis.size * axis.stride
            number = number // axis.size
        return found


class _Dim:
    """A dim of the view: which pieces of it each number stands for.

    ``cuts`` are the cut points of its finest pieces. If all bound digits are coarser than the local
    ones, a number stands for ``num_local`` pieces side by side; else it has several runs of pieces.
    """

    def __init__(self, digits: _Digits, cuts: Sequence[int], number: Number) -> None:
        self.number, self._cuts, self._digits = number, cuts, digits
        bound = [axis is not None for _, axis in digits]
        self._is_plain = bound == sorted(bound, reverse=True)
        self._num_local = prod(size for size, axis in digits if axis is None)
        self._known: dict[int, list[Interval]] = {}

    def runs(self, number: int) -> list[Interval]:
        """The intervals that a number stands for, none of them empty; neighbours are one."""
        if number not in self._known:
            self._known[number] = list(self._runs(number))
        return self._known[number]

    def _runs(self, number: int) -> Iterator[Interval]:
        cuts = self._cuts
        if self._is_plain:
            pieces: Iterable[Interval] = [
                (number * self._num_local, (number + 1) * self._num_local)
            ]
        else:
            pieces = [(piece, piece + 1) for piece in self._pieces(number)]
        begin = end = 0
        for first, last in pieces:
            if cuts[first] != end:
                if begin < end:
                    yield begin, end
                begin = cuts[first]
            end = cuts[last]
        if begin < end:
            yield begin, end

    def _pieces(self, number: int) -> list[int]:
        """Finest pieces whose bound digits make ``number``, ascending."""
        pieces, weight = [0], self.number.size
        for size, axis in self._digits:
            values: Iterable[int] = range(size)
            if axis is not None:
                weight //= size
                values = (number // weight % size,)
            pieces = [piece * size + value for piece in pieces for value in values]
        return pieces

    def meeting(self, low: int, high: int) -> Sequence[int]:
        """Numbers whose pieces meet ``[low, high)``, ascending; some of them may be empty."""
        near = _pieces(self._cuts, low, high)
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
        """How much of ``[low, high)`` every number has."""
        if not self._is_plain:
            clipped = [[min(b, high) - max(a, low) for a, b in self.runs(n)] for n in numbers]
            return np.array([sum(e for e in of_run if e > 0) for of_run in clipped], np.int64)
        first = np.asarray(numbers, np.int64) * self._num_local
        cuts = np.asarray(self._cuts, np.int64)
        begin, end = cuts[first], cuts[first + self._num_local]
        found: Ints = np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0)
        return found


class Cells:
    """The cells of the group of ``base``: ranks that differ from it in the ``free`` axes alone.

    All ranks are one group if ``free`` is None. Boxes are of ``view``, or of the tensor.

    Law (tests/planning/test_cells.py): they are those of the placement, within the group.
    """

    def __init__(
        self,
        source: Layout | Binding,
        base: int = 0,
        free: frozenset[int] | None = None,
        view: View | None = None,
    ) -> None:
        self._source = source
        view = view or View.whole(_shape(source))
        replicas, parts, digits, flat = _numbers_of(source)
        at = 0 if free is None else self.position(base)
        strides = _free_strides(source, free)

        def number(axes: Sequence[Axis]) -> Number:
            fixed = [
                None if strides is None or any(a <= axis.stride < b for a, b in strides)
                else at // axis.stride % axis.size
                for axis in axes
            ]  # fmt: skip
            return Number(axes, fixed)

        self._parts, self._replicas = number(parts), number(replicas)
        self._flat = number(flat)
        self._dims = []
        for of_dim, sizes, cuts in zip(digits, view.parts, _cuts(source), strict=True):
            for part, size in zip(_segments(of_dim, sizes), sizes, strict=True):
                num_pieces = prod(count for count, _ in part)
                is_given = len(sizes) == 1 and num_pieces == len(cuts) - 1
                own = cuts if is_given else range(0, size + 1, size // num_pieces)
                self._dims.append(_Dim(part, own, number([axis for _, axis in part if axis])))
        self.num_replicas = len(self._replicas.values)
        self.parts = self._parts.values
        """The value parts that ranks of the group hold, ascending."""
        self.ranks = source.ranks if isinstance(source, Layout) else source.grid.ranks
        """Of all groups, in the order of their positions."""

    def __contains__(self, rank: int) -> bool:
        source = self._source
        return rank in source if isinstance(source, Layout) else source.grid.holds(rank)

    @property
    def is_regular(self) -> bool:
        """Whether every dim is cut on its own."""
        return not self._flat.axes

    def position(self, rank: int) -> int:
        """Where ``rank`` stands in the numbering."""
        source = self._source
        return (source if isinstance(source, Layout) else source.grid).position(rank)

    def key(self, rank: int) -> Key:
        """Which boxes ``rank`` holds."""
        position = self.position(rank)
        key = tuple([dim.number.at(position) for dim in self._dims])
        return (*key, self._flat.at(position)) if self._flat.axes else key

    def part(self, rank: int) -> int:
        """The value part that ``rank`` holds."""
        return self._parts.at(self.position(rank))

    def boxes(self, key: Key) -> tuple[Box, ...]:
        """The boxes of a cell, none of them empty, in the order in which they lie in memory."""
        if self._flat.axes:
            return self._flat_boxes(key)
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
        """Cells that meet ``box``, in ascending order, each with a common box."""
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

    @cached_property
    def cuts(self) -> Cuts:
        """Bounds of all boxes along every dim, of cells that are ``is_regular``."""
        return tuple(
            tuple(
                sorted({bound for n in dim.number.values for run in dim.runs(n) for bound in run})
            )
            for dim in self._dims
        )

    @property
    def num_keys(self) -> int:
        """Cells of all groups."""
        return prod(dim.number.size for dim in self._dims) * self._flat.size

    def all_keys(self) -> Iterator[Key]:
        """All cells of the group, ascending; some may be empty."""
        flat = [self._flat.values] if self._flat.axes else []
        return product(*(dim.number.values for dim in self._dims), *flat)

    def meeting(self, box: Box) -> Iterator[Key]:
        """All cells that have elements of ``box``, and maybe others, in ascending order.

        Some of the others may be empty.
        """
        dims = zip(self._dims, box.lo, box.hi, strict=True)
        met = [dim.meeting(low, high) for dim, low, high in dims]
        return product(*met, *([self._flat.values] if self._flat.axes else []))

    def equal_shares(self, box: Box) -> list[Sequence[int]] | None:
        """The numbers of every dim of the cells that meet ``box``, if all have equally much of it.

        Their products, in ascending order, are the cells.
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
        """All ranks with this part of some of ``box``, ascending, and how much of it they have.

        For cells that are ``is_regular``.
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
        """What the coordinates of a key, and no others, add to a position."""
        found = sum(dim.number.offset(n) for dim, n in zip(self._dims, key, strict=False))
        return found + self._flat.offset(key[-1]) if self._flat.axes else found

    def _flat_boxes(self, key: Key) -> tuple[Box, ...]:
        assert isinstance(self._source, Binding), "a layout has no scratch digits"
        grid, targets = self._source.grid, self._source.targets
        at = grid.coordinates(self._offset(key))
        return self._source.boxes({t: c for t, c in zip(targets, at, strict=True) if t >= 0})


# --- views --------------------------------------------------------------------------------------


def view_of(sources: Sequence[Layout | Binding]) -> View:
    """The view with the fewest dims in which every cell of every source is one box.

    A dim is cut where some source has a local digit before a bound one, if its pieces are even and
    all sources have digits that end there, or may be cut there. If not, it stays whole.
    """
    shape = _shape(sources[0])
    found: list[set[int]] = [set() for _ in shape]
    places: list[set[int]] = [set() for _ in shape]
    for source in sources:
        *_, digits, flat = _numbers_of(source)
        if flat:
            return View.whole(shape)
        for d, of_dim in enumerate(digits):
            place, was_local = 1, False
            for size, axis in of_dim:
                if axis is not None and was_local:
                    found[d].add(place)
                was_local = axis is None
                place *= size
                places[d].add(place)
    parts = []
    for d, size in enumerate(shape):
        wanted = sorted(found[d])
        chain = sorted({*places[d], *wanted, size})
        nests = all(max(a, b) % min(a, b) == 0 for a in wanted for b in chain if size)
        is_even = bool(wanted) and all(_is_even(size, _cuts(source)[d]) for source in sources)
        bounds = [1, *wanted, size] if nests and is_even else [1, size]
        parts.append(tuple(b // a for a, b in pairwise(bounds)))
    view = View(tuple(parts))
    return view if view.num_dims <= MAX_DIMS else View.whole(shape)


def _is_even(size: int, cuts: tuple[int, ...]) -> bool:
    count = len(cuts) - 1
    return size > 0 and size % count == 0 and cuts == tuple(range(0, size + 1, size // count))


# --- sources ------------------------------------------------------------------------------------


def _shape(source: Layout | Binding) -> tuple[int, ...]:
    return source.shape if isinstance(source, Layout) else source.grid.shape


def _cuts(source: Layout | Binding) -> Cuts:
    return source.cuts if isinstance(source, Layout) else source.grid.cuts


def _numbers_of(
    source: Layout | Binding,
) -> tuple[list[Axis], list[Axis], list[_Digits], list[Axis]]:
    """The axes of replicas and of parts, the digits of every dim, and the axes of flat cuts.

    Scratch digits are digits of the dims, after all others, where they cut the finest pieces
    evenly. Where they do not, all of them are flat cuts.
    """
    if isinstance(source, Layout):
        stride = len(source.ranks)
        axes = []
        for count in source.rvd.counts:
            stride //= count
            axes.append(Axis(count, stride))
        return axes[:1], axes[1:2], [[(axis.size, axis)] for axis in axes[2:]], []
    grid, targets = source.grid, source.targets
    axis_of = {t: axis for axis, t in zip(grid.axes, targets, strict=True) if t >= 0}
    replicas, parts = (
        [axis for axis, t in zip(grid.axes, targets, strict=True) if t == mode] for mode in (R, V)
    )
    digits = [
        [(grid.digits[i].size, axis_of.get(i)) for i in grid.digit_values(d)]
        for d in range(len(grid.shape))
    ]
    scratch = [(grid.axes[a].size, axis_of.get(grid.scratch(a))) for a in source.scratch_order]
    bound = [axis for _, axis in scratch if axis is not None]
    if not bound:
        return replicas, parts, digits, []
    sizes = _even_cuts(grid.shape, grid.cuts, prod(size for size, _ in scratch))
    if sizes is None or not _nests(scratch, sizes):
        return replicas, parts, digits, bound
    both = zip(digits, _segments(scratch, [*sizes, 1]), strict=False)
    return replicas, parts, [[*own, *more] for own, more in both], []


def _even_cuts(shape: Sequence[int], cuts: Cuts, count: int) -> list[int] | None:
    """Pieces of every dim into which a flat cut in ``count`` divides a finest box, or None."""
    found = []
    for size, cut in zip(shape, cuts, strict=True):
        if not _is_even(size, cut):
            return None
        extent = size // (len(cut) - 1)
        own = min(count, extent)
        if count % own or extent % own:
            return None
        found.append(own)
        count //= own
    return found if count == 1 else None


def _nests(digits: _Digits, sizes: Iterable[int]) -> bool:
    """Whether every part of a view has whole factors of the digits."""
    place, bounds = 1, set[int]()
    for size in sizes:
        place *= size
        bounds.add(place)
    place = 1
    for size, _ in digits:
        inside = [b for b in bounds if place < b < place * size]
        if any(b % place or place * size % b for b in inside):
            return False
        place *= size
    return True


def _segments(digits: _Digits, sizes: Sequence[int]) -> list[_Digits]:
    """The digits of a dim in the parts of a view; a digit that crosses their bounds is cut."""
    todo = digits[::-1]
    found = []
    for room in sizes[:-1]:
        segment: _Digits = []
        while room > 1 and todo:
            size, axis = todo.pop()
            if size > room:
                inner = size // room
                todo.append((inner, axis and Axis(inner, axis.stride)))
                size, axis = room, axis and Axis(room, axis.stride * inner)
            segment.append((size, axis))
            room //= size
        found.append(segment)
    return [*found, todo[::-1]]


def _free_strides(
    source: Layout | Binding, free: frozenset[int] | None
) -> list[tuple[int, int]] | None:
    """Ranges of strides of the free axes; None if all are free."""
    if free is None or isinstance(source, Layout):
        return None
    axes = [source.grid.axes[a] for a in free]
    return [(axis.stride, axis.stride * axis.size) for axis in axes]


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
