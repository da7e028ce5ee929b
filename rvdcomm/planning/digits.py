"""Digits: layouts and bindings as mixed-radix numbers, and the views in which cells are boxes.

A rank's position is a mixed-radix number over axes. The rank's replica, its value part and its
piece along every dim are each a number over some of these axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

from rvdcomm.layout import MAX_DIMS, Cuts, Layout, View
from rvdcomm.planning.binding import BoundAxis, R, Source, V

Digits = list[tuple[int, BoundAxis | None]]
"""The digits of a dim, coarsest first: (size, axis that it is bound to); no axis if local."""


def view_of(sources: Sequence[Source]) -> View:
    """The view with the fewest dims in which every cell of every source is one box.

    A dim is split where some source has a local digit before a bound one, provided that its pieces
    are even and that the digits of all sources end there or can be split there. Otherwise the dim
    stays whole.
    """
    shape = sources[0].shape
    found: list[set[int]] = [set() for _ in shape]
    places: list[set[int]] = [set() for _ in shape]
    for source in sources:
        *_, digits, flat = numbers_of(source)
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
        is_even = bool(wanted) and all(_is_even(size, source.cuts[d]) for source in sources)
        bounds = [1, *wanted, size] if nests and is_even else [1, size]
        parts.append(tuple(b // a for a, b in pairwise(bounds)))
    view = View(tuple(parts))
    return view if view.num_dims <= MAX_DIMS else View.whole(shape)


def _is_even(size: int, cuts: tuple[int, ...]) -> bool:
    count = len(cuts) - 1
    return size > 0 and size % count == 0 and cuts == tuple(range(0, size + 1, size // count))


def numbers_of(
    source: Source,
) -> tuple[list[BoundAxis], list[BoundAxis], list[Digits], list[BoundAxis]]:
    """The axes of replicas and of parts, the digits of every dim, and the axes of flat cuts.

    If scratch digits cut the finest pieces evenly, they count as the last digits of the dims.
    Otherwise all of them are flat cuts.
    """
    if isinstance(source, Layout):
        stride = len(source.ranks)
        axes = []
        for count in source.rvd.counts:
            stride //= count
            axes.append(BoundAxis(count, stride))
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
    both = zip(digits, segments(scratch, [*sizes, 1]), strict=False)
    return replicas, parts, [[*own, *more] for own, more in both], []


def _even_cuts(shape: Sequence[int], cuts: Cuts, count: int) -> list[int] | None:
    """Pieces per dim into which a flat cut in ``count`` divides a finest box; None if uneven."""
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


def _nests(digits: Digits, sizes: Iterable[int]) -> bool:
    """Whether the parts of a view split the digits of a dim into whole factors."""
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


def segments(digits: Digits, sizes: Sequence[int]) -> list[Digits]:
    """The digits of a dim by part of a view; a digit that crosses a bound of the parts is split."""
    todo = digits[::-1]
    found = []
    for room in sizes[:-1]:
        segment: Digits = []
        while room > 1 and todo:
            size, axis = todo.pop()
            if size > room:
                inner = size // room
                todo.append((inner, axis and BoundAxis(inner, axis.stride)))
                size, axis = room, axis and BoundAxis(room, axis.stride * inner)
            segment.append((size, axis))
            room //= size
        found.append(segment)
    return [*found, todo[::-1]]
