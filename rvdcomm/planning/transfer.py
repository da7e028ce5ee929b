"""Transfer: the cost of one exchange between two disjoint groups, by formula.

The formula holds where both sides are even and regular and all pairs of ranks are equally far
apart. Then all holders of a piece send the same number of bytes, all readers of a part receive the
same number, and both follow from the counts (tests/planning/test_transfer.py compares with
counting).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from rvdcomm.cost import port_secs
from rvdcomm.layout import Layout, Topology
from rvdcomm.planning.binding import Binding, R, V


@dataclass(frozen=True, slots=True)
class _EvenPlacement:
    """An even, regular placement over a run of ranks: counts, and pieces of every dim.

    ``part_axes`` and ``replica_axes`` are (size, stride) of the axes that are bound to V and to R;
    outermost first.
    """

    span: range
    r: int
    v: int
    pieces: tuple[int, ...]
    part_axes: tuple[tuple[int, int], ...]
    replica_axes: tuple[tuple[int, int], ...]

    def parts(self) -> np.ndarray:
        """The value part of every rank."""
        position, part = np.arange(len(self.span)), np.zeros(len(self.span), dtype=np.int64)
        for size, stride in self.part_axes:
            part = part * size + position // stride % size
        return part

    def replicas_within(self, block: int) -> int | None:
        """Replicas of a piece in every run of ``block`` ranks; None if runs differ in it."""
        count = 1
        for size, stride in self.replica_axes:
            if stride % block == 0:
                continue
            if block % stride or ((size * stride) % block and block % (size * stride)):
                return None
            count *= min(size, block // stride)
        return count


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The cost of one exchange between disjoint groups.

    Attributes:
        secs, rounds: under the port model.
        sent_bytes: of every src rank.
        recv_bytes: of every dst rank, in the order of the ranks; one number if all are equal.
        distance: the levels that every byte crosses.
    """

    secs: float
    rounds: int
    sent_bytes: int
    recv_bytes: int | NDArray[np.int64]
    distance: int


def transfer_cost(
    src: Layout | Binding, dst: Layout | Binding, item_bytes: int, topology: Topology
) -> tuple[float, int] | None:
    """Seconds and rounds of ``transfer``."""
    found = transfer(src, dst, item_bytes, topology)
    return None if found is None else (found.secs, found.rounds)


def transfer(
    src: Layout | Binding, dst: Layout | Binding, item_bytes: int, topology: Topology
) -> TransferCost | None:
    """The exchange from ``src`` to ``dst`` by formula; None where the formula does not hold.

    R and V are the counts of a side. A *need* is the region that one reader takes from one src
    piece. Every reader takes its needs of all src parts; if dst has several parts, the src parts
    are dealt out to them in turn. The R holders of a piece serve its needs in equal shares, first
    divided over their hosts.
    """
    a, b = _side(src), _side(dst)
    if a is None or b is None or topology.runs is None:
        return None
    distance = equal_distance(a.span, b.span, topology)
    nests = all(max(p, q) % min(p, q) == 0 for p, q in zip(a.pieces, b.pieces, strict=True))
    if distance is None or not nests:
        return None
    shape = src.shape if isinstance(src, Layout) else src.grid.shape
    need_size = prod(shape) // prod(map(max, a.pieces, b.pieces))
    readers = b.r * prod(max(q // p, 1) for p, q in zip(a.pieces, b.pieces, strict=True))
    needs = a.v * prod(max(p // q, 1) for p, q in zip(a.pieces, b.pieces, strict=True))
    if (readers % a.r and a.r % readers) or readers * need_size % a.r:
        return None
    taken = [needs // b.v + (part < needs % b.v) for part in range(b.v)]
    senders = _senders(a, readers, topology)
    if senders is None:
        return None
    rounds = max(readers // a.r, taken[0] * senders, 1)
    sent = readers * need_size // a.r
    received: int | NDArray[np.int64] = taken[0] * need_size
    if needs % b.v:
        received = np.array(taken)[b.parts()] * need_size
    port_bytes = [0] * len(topology.levels)
    for level, run in enumerate(topology.runs[:distance]):
        blocks = run.block(a.span), run.block(b.span)
        if blocks[0] is None or blocks[1] is None:
            return None
        into = (
            int(received.reshape(-1, blocks[1]).sum(axis=1).max())
            if isinstance(received, np.ndarray)
            else received * blocks[1]
        )
        port_bytes[level] = max(sent * blocks[0], into) * item_bytes
    if not need_size:
        return TransferCost(0.0, 0, 0, 0, distance)
    secs = port_secs(port_bytes, rounds, topology)
    return TransferCost(secs, rounds, sent * item_bytes, received * item_bytes, distance)


def _senders(src: _EvenPlacement, readers: int, topology: Topology) -> int | None:
    """How many holders of a piece each of its readers takes from: at most one of every host.

    The holders are ordered by host, and each reader is served by a run of them.
    """
    run = src.r // readers
    if run <= 1:
        return 1
    if topology.runs is None or len(topology.levels) == 1:
        return 1
    block = topology.runs[1].block(src.span)
    a_host = None if block is None else src.replicas_within(block)
    if a_host is None:
        return None
    firsts = range(0, src.r, run)
    return max((first + run - 1) // a_host - first // a_host + 1 for first in firsts)


def equal_distance(src: range, dst: range, topology: Topology) -> int | None:
    """The levels that every byte crosses; None if some pairs of ranks are farther apart."""
    for level, run in enumerate(topology.runs or ()):
        a, b = run.groups(src), run.groups(dst)
        if a.stop > b.start and b.stop > a.start:
            return level if level and len(a) == len(b) == 1 else None
    return len(topology.levels)


def _side(source: Layout | Binding) -> _EvenPlacement | None:
    if isinstance(source, Layout):
        if source.span is None:
            return None
        rvd = source.rvd
        parts = prod(rvd.d)
        return _EvenPlacement(
            source.span, rvd.r, rvd.v, rvd.d, ((rvd.v, parts),), ((rvd.r, rvd.v * parts),)
        )
    grid, pieces = source.grid, _pieces(source)
    if grid.span is None or pieces is None:
        return None
    axes = list(zip(grid.axes, source.targets, strict=True))
    part_axes = tuple((axis.size, axis.stride) for axis, t in axes if t == V)
    replica_axes = tuple((axis.size, axis.stride) for axis, t in axes if t == R)
    r, v = (prod(size for size, _ in axes) for axes in (replica_axes, part_axes))
    return _EvenPlacement(grid.span, r, v, pieces, part_axes, replica_axes)


def _pieces(binding: Binding) -> tuple[int, ...] | None:
    """The number of pieces of every dim; None if some rank holds more than one box.

    A flat cut of a box cuts its dims, outermost first, as long as their sizes divide.
    """
    grid, bound = binding.grid, set(binding.targets)
    flat = prod(
        axis.size for a, axis in enumerate(grid.axes) if binding.targets[a] == grid.scratch(a)
    )
    # A cut is strided if it lies inside an unbound scratch digit or inside a local digit.
    is_bound = [grid.scratch(a) in bound for a in binding.scratch_order]
    is_outermost = is_bound == sorted(is_bound, reverse=True)
    if flat > 1 and not (is_outermost and all(i in bound for i in range(len(grid.digits)))):
        return None
    pieces = []
    for d, size in enumerate(grid.shape):
        digits = grid.digit_values(d)
        is_bound = [i in bound for i in digits]
        if is_bound != sorted(is_bound, reverse=True):
            return None
        count = prod(grid.digits[i].size for i in digits if i in bound)
        box_size = size // count
        cut = flat if flat < box_size else box_size
        if box_size and (flat % cut or box_size % cut):
            return None
        pieces.append(count * max(cut, 1))
        flat //= max(cut, 1)
    return tuple(pieces) if flat == 1 else None
