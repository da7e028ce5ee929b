"""Layout: which rank holds which replica, value part and box of a tensor."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from rvdcomm.errors import LayoutError
from rvdcomm.layout.box import MAX_DIMS, Box
from rvdcomm.layout.placement import Holding, Holdings
from rvdcomm.layout.rvd import RVD
from rvdcomm.text import MAX_INTEGER, integer, quoted

Cuts = tuple[tuple[int, ...], ...]

MAX_RANKS = 1 << 20
"""A layout stores one number per rank. The limit keeps a short text from exhausting the memory."""

MAX_RANK = 2**31 - 1
"""The native core stores the number of a rank in 32 bits."""

_FORM = re.compile(
    r"(\S+) shape\(([0-9,]*)\)(?: ranks\(([0-9,:]+)\))?(?: cuts\(([a-z]+|[0-9,;]*)\))?"
)


def chunk_cuts(size: int, count: int) -> tuple[int, ...]:
    """Cut points of ``torch.chunk`` and DTensor: pieces of ``ceil(size / count)``, then smaller."""
    piece = -(-size // count)
    return tuple(min(i * piece, size) for i in range(count + 1))


def balanced_cuts(size: int, count: int) -> tuple[int, ...]:
    """Cut points of ``numpy.array_split``: the first ``size % count`` pieces are one larger."""
    piece, extra = divmod(size, count)
    return tuple(i * piece + min(i, extra) for i in range(count + 1))


def widest_pieces(cuts: Cuts) -> tuple[int, ...]:
    """The extent of the widest piece along every dim."""
    return tuple(max(high - low for low, high in pairwise(cut)) for cut in cuts)


CUT_RULES = {"chunk": chunk_cuts, "balanced": balanced_cuts}


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What one rank holds: a box, and the indices of its replica and value part (partial sum)."""

    replica: int
    part: int
    box: Box


@dataclass(frozen=True, order=True, init=False)
class Layout:
    """The layout of a tensor of ``shape`` over ``ranks``: R outermost, the last dim innermost.

    Frozen, hashable and canonical. The replicas of a cell are interchangeable, and so are the value
    parts of a box and the ranks with equal empty boxes. Interchangeable ranks are sorted on
    construction, so that equal placements under one RVD are equal objects. ``cuts`` is a rule
    (``"chunk"``, ``"balanced"``) or the cut points of every dim, ends included.

    Laws (tests/layout/test_layout.py): the boxes of one (replica, part) tile the tensor;
    ``Layout.parse(str(x)) == x``.

    >>> Layout((4, 6), "R(1)V(1)D(1,2)").cell(1)
    Cell(replica=0, part=0, box=Box(lo=(0, 3), hi=(4, 6)))
    >>> str(Layout((4, 6), "R(2)V(1)D(1,2)", ranks=[5, 4, 3, 2]))
    'R(2)V(1)D(1,2) shape(4,6) ranks(3,2,5,4)'

    Raises:
        LayoutError: counts, ranks, shape and cut points do not fit each other.
    """

    shape: tuple[int, ...]
    rvd: RVD
    ranks: tuple[int, ...]
    cuts: Cuts

    def __init__(
        self,
        shape: Iterable[int],
        rvd: RVD | str,
        ranks: Iterable[int] | None = None,
        cuts: str | Sequence[Sequence[int]] = "chunk",
    ) -> None:
        shape = _integers(shape, "shape")
        rvd = RVD(rvd)
        if rvd.num_ranks > MAX_RANKS:
            raise LayoutError(
                f"{rvd} needs {rvd.num_ranks} ranks; a layout has at most {MAX_RANKS}."
            )
        given = tuple(range(rvd.num_ranks)) if ranks is None else _integers(ranks, "ranks")
        _check_counts(shape, rvd, given)
        all_cuts = _resolve_cuts(shape, rvd, cuts)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "rvd", rvd)
        object.__setattr__(self, "cuts", all_cuts)
        object.__setattr__(self, "ranks", _canonical_ranks(rvd, given, all_cuts))
        # These take time in proportion to the ranks, so they are computed here and not per plan.
        _ = self._hash, self.span, self.is_even

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    @cached_property
    def span(self) -> range | None:
        """The ranks as a range if they ascend without gaps, else None.

        The cells are then in row-major order of the ranks.
        """
        span = range(self.ranks[0], self.ranks[0] + len(self.ranks))
        return span if self.ranks[-1] == span[-1] and self.ranks == tuple(span) else None

    @cached_property
    def is_even(self) -> bool:
        """Whether all boxes are equally large along every dim."""
        return all(
            size % count == 0 and cut == chunk_cuts(size, count)
            for size, count, cut in zip(self.shape, self.rvd.d, self.cuts, strict=True)
        )

    @property
    def largest_shard(self) -> int:
        """Elements of the largest shard."""
        return prod(widest_pieces(self.cuts))

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.rvd, self.ranks, self.cuts))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("shape", "rvd", "ranks", "cuts")}

    def __contains__(self, rank: int) -> bool:
        return rank in (self._position if self.span is None else self.span)

    def position(self, rank: int) -> int:
        """The index of ``rank`` in ``ranks``.

        Raises:
            LayoutError: ``rank`` is not in the layout.
        """
        if rank not in self:
            raise LayoutError(f"rank {rank} is not in {self}.")
        return self._position[rank] if self.span is None else rank - self.span.start

    def cell(self, rank: int) -> Cell:
        """The cell of ``rank``; tests, the simulator and the executors all derive from it."""
        index = []
        rest = self.position(rank)
        for count in reversed(self.rvd.counts):
            rest, digit = divmod(rest, count)
            index.append(digit)
        replica, part, *splits = reversed(index)
        return Cell(replica, part, self.box(splits))

    def box(self, index: Sequence[int]) -> Box:
        """The box that is piece ``index[d]`` along every dim d."""
        return Box(
            tuple(cut[i] for cut, i in zip(self.cuts, index, strict=True)),
            tuple(cut[i + 1] for cut, i in zip(self.cuts, index, strict=True)),
        )

    @cached_property
    def placement(self) -> Holdings:
        """The layout as a placement, in which replicas are not numbered."""
        array = np.array(self.ranks).reshape(self.rvd.r, self.rvd.v, -1)
        boxes = [self.box(index) for index in np.ndindex(*self.rvd.d)]
        holdings = tuple(
            Holding(part, (box,), tuple(sorted(array[:, part, i].tolist())))
            for part in range(self.rvd.v)
            for i, box in enumerate(boxes)
        )
        return Holdings(self.shape, self.rvd.v, holdings)

    def __str__(self) -> str:
        text = (
            f"{self.rvd} shape({','.join(map(str, self.shape))}) ranks({ranges_text(self.ranks)})"
        )
        for name, rule in CUT_RULES.items():
            if self.cuts == _by_rule(rule, self.shape, self.rvd):
                return text if name == "chunk" else f"{text} cuts({name})"
        return f"{text} cuts({';'.join(','.join(map(str, cut)) for cut in self.cuts)})"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text that ``str`` writes; ranks and cuts may be left out.

        >>> Layout.parse("R(1)V(1)D(2) shape(10) cuts(0,3,10)").cell(1).box
        Box(lo=(3,), hi=(10,))
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise _form_error(text)
        rvd, shape, ranks, cuts = found.groups()
        counts = RVD(rvd)
        # Pieces are counted before the text is split, which limits the memory that a text takes.
        if shape.count(",") >= MAX_DIMS or (cuts or "").count(",") > MAX_RANKS:
            raise _form_error(text)
        rule: Any = cuts or "chunk"
        try:
            sizes = _numbers(shape) if shape else []
            if cuts is not None and not cuts.isalpha():
                rule = [_numbers(cut) for cut in cuts.split(";", MAX_DIMS)] if cuts else []
        except LayoutError:
            raise _form_error(text) from None
        given = None if ranks is None else parse_ranges(ranks)
        return cls(sizes, counts, given, rule)


def ranges_text(ranks: Sequence[int]) -> str:
    """Write numbers with runs as ``start:stop``; ``parse_ranges`` reads them.

    >>> ranges_text([0, 1, 2, 3, 7, 5])
    '0:4,7,5'
    """
    out, i = [], 0
    while i < len(ranks):
        j = i + 1
        while j < len(ranks) and ranks[j] == ranks[j - 1] + 1:
            j += 1
        run = ranks[i:j]
        out.append(f"{run[0]}:{run[-1] + 1}" if len(run) > 2 else ",".join(map(str, run)))
        i = j
    return ",".join(out)


def parse_ranges(text: str, most: int = MAX_RANKS) -> tuple[int, ...]:
    """Read numbers and half-open runs: ``0:4,7,5``.

    Raises:
        LayoutError: the text has another form, or means more than ``most`` numbers.
    """
    out: list[int] = []
    for item in text.split(",", most):
        start, is_run, stop = item.partition(":")
        try:
            first = integer(start)
            run = range(first, integer(stop) if is_run else first + 1)
        except LayoutError:
            raise LayoutError(
                f"cannot parse ranks {quoted(text)}: expected the form '0:4,7,5'."
            ) from None
        if len(out) + len(run) > most:
            raise LayoutError(f"ranks {quoted(text)} are more than {most}.")
        out.extend(run)
    return tuple(out)


def _numbers(text: str) -> list[int]:
    return list(map(integer, text.split(",")))


def _form_error(text: str) -> LayoutError:
    return LayoutError(
        f"cannot parse layout {quoted(text)}: expected the form "
        "'R(1)V(1)D(1,2) shape(4,6) ranks(0:2) cuts(0,4;0,2,6)'."
    )


def _integers(values: Iterable[int], what: str) -> tuple[int, ...]:
    """The values as plain integers; a float is an error and is not rounded."""
    values = tuple(values)
    try:
        # int() as well, since operator.index(True) is True.
        return tuple(map(int, map(operator.index, values)))
    except TypeError:
        raise LayoutError(f"{what} must be integers, got {quoted(values)}.") from None


def _check_counts(shape: tuple[int, ...], rvd: RVD, ranks: tuple[int, ...]) -> None:
    if any(size < 0 for size in shape):
        raise LayoutError(f"shape {quoted(shape)} has a negative size; use sizes of at least 0.")
    if prod(size for size in shape if size) > MAX_INTEGER:
        raise LayoutError(f"shape {quoted(shape)} has more than {MAX_INTEGER} elements.")
    if len(rvd.d) != len(shape):
        raise LayoutError(
            f"{rvd} splits {len(rvd.d)} dims but shape {quoted(shape)} has {len(shape)}; "
            "give D one count a dim."
        )
    if len(ranks) != rvd.num_ranks:
        factors = "*".join(map(str, rvd.counts))
        raise LayoutError(
            f"{rvd} needs {rvd.num_ranks} ranks ({factors}) but {len(ranks)} were given: "
            f"{quoted(ranks)}."
        )
    if len(set(ranks)) != len(ranks):
        twice = min(rank for rank, count in Counter(ranks).items() if count > 1)
        raise LayoutError(f"{rvd} over ranks {quoted(ranks)}: rank {twice} is given twice.")
    if min(ranks) < 0:
        raise LayoutError(f"{rvd} over ranks {quoted(ranks)}: rank {min(ranks)} is negative.")
    if max(ranks) > MAX_RANK:
        raise LayoutError(
            f"{rvd} over ranks {quoted(ranks)}: rank {max(ranks)} is above {MAX_RANK}."
        )


def _by_rule(rule: Any, shape: tuple[int, ...], rvd: RVD) -> Cuts:
    return tuple(rule(size, count) for size, count in zip(shape, rvd.d, strict=True))


def _resolve_cuts(shape: tuple[int, ...], rvd: RVD, cuts: str | Sequence[Sequence[int]]) -> Cuts:
    if isinstance(cuts, str):
        if cuts not in CUT_RULES:
            known = ", ".join(map(repr, CUT_RULES))
            raise LayoutError(
                f"cuts={quoted(cuts)} is no rule; use {known}, or cut points of every dim."
            )
        return _by_rule(CUT_RULES[cuts], shape, rvd)
    resolved = tuple(_integers(cut, "cut points") for cut in cuts)
    if len(resolved) != len(shape):
        raise LayoutError(
            f"cuts of {len(resolved)} dims given for shape {quoted(shape)}; give one a dim."
        )
    for d, (size, count, cut) in enumerate(zip(shape, rvd.d, resolved, strict=True)):
        if len(cut) != count + 1 or cut[0] != 0 or cut[-1] != size or list(cut) != sorted(cut):
            raise LayoutError(
                f"cut points {quoted(list(cut))} of dim {d} do not cut {size} elements in {count}; "
                f"give {count + 1} points in ascending order from 0 to {size}."
            )
    return resolved


def _canonical_ranks(rvd: RVD, ranks: tuple[int, ...], cuts: Cuts) -> tuple[int, ...]:
    """Sort the replicas of every cell, then the parts of every box by their first holder."""
    has_empty = any(len(set(cut)) < len(cut) for cut in cuts)
    if len(ranks) == prod(rvd.d) and not has_empty:
        return ranks
    array = np.array(ranks).reshape(rvd.r, rvd.v, -1)
    # A rank with an empty box holds nothing, so ranks with equal empty boxes are interchangeable.
    for cells in _equal_empty_cells(rvd, cuts) if has_empty else ():
        idle = np.sort(array[:, :, cells].reshape(-1))
        array[:, :, cells] = idle.reshape(-1, rvd.v, rvd.r).transpose(2, 1, 0)
    array.sort(axis=0)
    by_first_holder = np.argsort(array[0], axis=0)
    array = np.take_along_axis(array, by_first_holder[None], axis=1)
    return tuple(array.reshape(-1).tolist())


def _equal_empty_cells(rvd: RVD, cuts: Cuts) -> Iterator[np.ndarray]:
    """Yield, for each distinct empty box, the ascending indices of the cells that have it."""
    box = np.zeros(rvd.d, dtype=np.int64)
    is_empty = np.zeros(rvd.d, dtype=bool)
    for d, cut in enumerate(cuts):
        along = [1] * len(cuts)
        along[d] = -1
        pieces = np.stack([cut[:-1], cut[1:]], axis=1)
        # Pieces ascend, so equal ones are neighbours.
        is_new = np.any(np.diff(pieces, axis=0, prepend=pieces[:1]), axis=1)
        # A box has a mixed-radix number, one digit per dim. It is below the number of ranks.
        box = box * len(pieces) + np.cumsum(is_new).reshape(along)
        is_empty |= (pieces[:, 0] == pieces[:, 1]).reshape(along)
    cells = np.flatnonzero(is_empty)
    boxes = box.reshape(-1)[cells]
    order = np.argsort(boxes, kind="stable")
    yield from np.split(cells[order], np.flatnonzero(np.diff(boxes[order])) + 1)
