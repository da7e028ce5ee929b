"""Transfer: the cost of one exchange between two disjoint groups, by formula.

The formula holds where both sides are even and regular and all pairs of ranks are equally far
apart. Then all holders of a piece send equally many bytes, and all readers of a part receive
equally many bytes. Both numbers follow from the counts of replicas, parts and pieces
(tests/planning/test_transfer.py compares with counting).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from rvdcomm.cost import port_secs
from rvdcomm.layout import Ints, Layout
from rvdcomm.network import Topology
from rvdcomm.planning.binding import Binding, BoundAxis, Source
from rvdcomm.planning.digits import numbers_of


@dataclass(frozen=True, slots=True)
class _EvenPlacement:
    """An even, regular placement over a run of ranks; ``pieces`` are counts, one per dim.

    ``part_axes`` and ``replica_axes`` are the axes that are bound to V and to R, outermost first.
    """

    span: range
    pieces: tuple[int, ...]
    part_axes: list[BoundAxis]
    replica_axes: list[BoundAxis]

    @property
    def r(self) -> int:
        """Replicas."""
        return prod(axis.size for axis in self.replica_axes)

    @property
    def v(self) -> int:
        """Value parts."""
        return prod(axis.size for axis in self.part_axes)

    def parts(self) -> Ints:
        """The value part of every rank."""
        position, part = np.arange(len(self.span)), np.zeros(len(self.span), dtype=np.int64)
        for axis in self.part_axes:
            part = part * axis.size + position // axis.stride % axis.size
        return part

    def replicas_within(self, block: int) -> int | None:
        """Replicas of a piece in every run of ``block`` ranks; None if the runs differ in this."""
        count = 1
        for axis in self.replica_axes:
            end = axis.size * axis.stride
            if axis.stride % block == 0:
                continue
            if block % axis.stride or (end % block and block % end):
                return None
            count *= min(axis.size, block // axis.stride)
        return count


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The cost of one exchange between disjoint groups.

    Attributes:
        secs, rounds: time and rounds under the port model.
        sent_bytes: bytes that every src rank sends.
        recv_bytes: bytes that each dst rank receives, in rank order; one number if all are equal.
        distance: the number of levels that every byte crosses.
    """

    secs: float
    rounds: int
    sent_bytes: int
    recv_bytes: int | Ints
    distance: int


def transfer(src: Source, dst: Source, item_bytes: int, topology: Topology) -> TransferCost | None:
    """The exchange from ``src`` to ``dst`` by formula; None where the formula does not hold.

    A *need* is the region that one reader takes from one src piece. Every reader takes its needs
    from all src parts; if dst has several parts, the src parts are assigned to them in turn. The
    holders of a piece serve its needs in equal shares, which are first divided over the holders'
    hosts (docs/exchange.md).
    """
    a, b = _side(src), _side(dst)
    if a is None or b is None or topology.runs is None:
        return None
    distance = equal_distance(a.span, b.span, topology)
    nests = all(max(p, q) % min(p, q) == 0 for p, q in zip(a.pieces, b.pieces, strict=True))
    if distance is None or not nests:
        return None
    need_size = prod(src.shape) // prod(map(max, a.pieces, b.pieces))
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
    received: int | Ints = taken[0] * need_size
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
    """The most holders from which a reader takes one piece: at most one on every host.

    The holders are ordered by host, and each reader is served by a run of holders. None if the
    holders are not spread equally over the hosts.
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
    """The number of levels that every byte crosses; None if pairs of ranks may differ in it."""
    for level, run in enumerate(topology.runs or ()):
        a, b = run.groups(src), run.groups(dst)
        if a.stop > b.start and b.stop > a.start:
            return level if level and len(a) == len(b) == 1 else None
    return len(topology.levels)


def _side(source: Source) -> _EvenPlacement | None:
    pieces = source.rvd.d if isinstance(source, Layout) else _pieces(source)
    if source.span is None or pieces is None:
        return None
    replicas, parts, *_ = numbers_of(source)
    return _EvenPlacement(source.span, pieces, parts, replicas)


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
