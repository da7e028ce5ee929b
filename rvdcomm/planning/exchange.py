"""Exchange: the exact overlaps that take a tensor from any placement to any other.

This is the meaning of every step. A rank's need is served from its own memory first, then by ranks
of its own host, then by all holders; whoever may serve a need shares it equally.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rvdcomm.layout import Box, Holding, Placement, Topology


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """``dst_rank`` takes ``box`` of value part ``part`` from ``src_rank`` (maybe itself)."""

    src_rank: int
    dst_rank: int
    part: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Need:
    """Ranks that take ``box`` of one holding."""

    box: Box
    consumers: tuple[int, ...]


def exchange(
    src: Placement,
    dst: Placement,
    topology: Topology,
    groups: Sequence[Sequence[int]] | None = None,
) -> tuple[Move, ...]:
    """All moves from ``src`` to ``dst``, sorted; inside each of ``groups`` alone, if given.

    Laws (tests/planning/test_exchange.py): every element of every dst shard gets every part once;
    with one part the busiest rank receives no more than it lacks; holders of one piece send
    equally much.
    """
    everyone = tuple(sorted(set(src.ranks) | set(dst.ranks)))
    moves: list[Move] = []
    for group in groups or (everyone,):
        members = frozenset(group)
        for holding, needs in _needs(_within(src, members), _within(dst, members)):
            moves.extend(_served(holding, needs, topology))
    return tuple(sorted(moves))


def _within(placement: Placement, members: frozenset[int]) -> list[Holding]:
    """Holdings that some member has, with the members alone as holders."""
    out = []
    for holding in placement.holdings:
        ranks = tuple(rank for rank in holding.ranks if rank in members)
        if ranks and holding.boxes:
            out.append(Holding(holding.part, holding.boxes, ranks))
    return out


def _needs(src: list[Holding], dst: list[Holding]) -> Iterator[tuple[Holding, list[_Need]]]:
    """For every src holding, what is taken of it and by whom."""
    # Dst shards with the same boxes differ only in their part: a src part goes to one of them.
    regions: dict[tuple[Box, ...], list[Holding]] = {}
    for holding in dst:
        regions.setdefault(holding.boxes, []).append(holding)
    boxes = [(parts, box) for region, parts in regions.items() for box in region]
    num_taken: dict[int, int] = {}
    for holding, overlaps in zip(src, _overlaps(src, [box for _, box in boxes]), strict=True):
        needs = []
        for i, common in overlaps:
            taker = _taker(holding, boxes[i][0], num_taken)
            num_taken[id(taker)] = num_taken.get(id(taker), 0) + common.num_elements
            needs.append(_Need(common, taker.ranks))
        yield holding, needs


def _overlaps(src: list[Holding], boxes: list[Box]) -> Iterator[list[tuple[int, Box]]]:
    """For every src holding, the boxes that it meets and the common regions."""
    if not boxes:
        yield from ([] for _ in src)
        return
    num_dims = len(boxes[0].lo)
    lo = np.array([box.lo for box in boxes]).reshape(len(boxes), num_dims)
    hi = np.array([box.hi for box in boxes]).reshape(len(boxes), num_dims)
    for holding in src:
        found = []
        for box in holding.boxes:
            is_met = ((lo < box.hi) & (hi > box.lo)).all(axis=1)
            for i in np.flatnonzero(is_met).tolist():
                common = box.intersect(boxes[i])
                if common is not None:
                    found.append((i, common))
        yield found


def _taker(holding: Holding, parts: list[Holding], num_taken: dict[int, int]) -> Holding:
    """The dst part that adds this src part: most holders in common, then least taken so far."""
    if len(parts) == 1:
        return parts[0]
    return min(
        parts,
        key=lambda p: (len(set(p.ranks) - set(holding.ranks)), num_taken.get(id(p), 0), p.part),
    )


def _served(holding: Holding, needs: Iterable[_Need], topology: Topology) -> Iterator[Move]:
    """Moves that serve the needs of one holding: own memory, own host, then all holders."""
    holders = frozenset(holding.ranks)
    # Needs by who may serve them. Keys are tuples of holders, so the order is deterministic.
    queues: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    nearest: dict[int, tuple[int, ...]] = {}
    for need in needs:
        for rank in need.consumers:
            if rank in holders:
                yield Move(rank, rank, holding.part, need.box)
                continue
            if rank not in nearest:
                nearest[rank] = _nearest(rank, holding.ranks, topology)
            queues.setdefault(nearest[rank], []).append((rank, need.box))
    for servers, queue in queues.items():
        for server, rank, box in _shared(servers, sorted(queue)):
            yield Move(server, rank, holding.part, box)


def _nearest(rank: int, holders: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """The holders at the least distance."""
    distances = [topology.distance(rank, holder) for holder in holders]
    least = min(distances)
    return tuple(h for h, distance in zip(holders, distances, strict=True) if distance == least)


def _shared(
    servers: tuple[int, ...], queue: list[tuple[int, Box]]
) -> Iterator[tuple[int, int, Box]]:
    """Lay the needs end to end and cut them into one equal run a server."""
    total = sum(box.num_elements for _, box in queue)
    bounds = [i * total // len(servers) for i in range(1, len(servers) + 1)]
    server = position = 0
    for rank, box in queue:
        done, size = 0, box.num_elements
        while done < size:
            while bounds[server] <= position:
                server += 1
            take = min(size - done, bounds[server] - position)
            for piece in box.flat_range(done, done + take):
                yield servers[server], rank, piece
            done += take
            position += take
