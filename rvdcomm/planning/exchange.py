"""Exchange: the exact overlaps that take a tensor from any placement to any other.

This is the meaning of every step. A rank's need is served from its own memory first, then by ranks
of its own host, then by all holders. The moves of one rank are computed from the two placements
alone, in a time that grows with those moves; all moves are the union over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rvdcomm.layout import Box, Topology
from rvdcomm.planning.cells import Cells, Key


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """``dst_rank`` takes ``box`` of value part ``part`` from ``src_rank`` (maybe itself)."""

    src_rank: int
    dst_rank: int
    part: int
    box: Box


_HoldingKey = tuple[Key, int]
"""(key, part): what the ranks of ``Cells.holders`` hold."""


class Exchange:
    """The moves from ``src`` to ``dst`` inside one group of ranks.

    Who may serve a need shares it: the needs of a holding are laid end to end, and every holder
    gives an equal run of them. Inside a host a reader then takes its run from one holder where
    there are enough: among readers that have the same servers no port is busier than with equal
    shares, and there are fewer messages (docs/exchange.md).

    Laws (tests/planning/test_exchange.py): every element of every dst shard gets every part once;
    with one part the busiest rank receives no more than it lacks; on one host no holder sends more
    than its share or what one reader needs; ``into`` and ``out_of`` name the same moves.
    """

    def __init__(self, src: Cells, dst: Cells, topology: Topology) -> None:
        self.src, self.dst, self.topology = src, dst, topology
        self._takers: dict[Key, dict[_HoldingKey, int]] = {}
        self._shares: dict[_HoldingKey, list[Move]] = {}

    def into(self, rank: int) -> list[Move]:
        """What ``rank`` takes, from itself too, sorted."""
        if rank not in self.dst:
            return []
        key, own_part = self.dst.key(rank), self.dst.part(rank)
        moves: list[Move] = []
        shared: set[_HoldingKey] = set()
        for theirs, box in self._overlaps(self.src, self.dst.boxes(key)):
            for part in self.src.parts:
                if self._taker(key, (theirs, part)) != own_part:
                    continue
                holders = self.src.holders(theirs, part)
                if rank in holders:
                    moves.append(Move(rank, rank, part, box))
                elif len(holders) == 1:
                    moves.append(Move(holders[0], rank, part, box))
                else:
                    shared.add((theirs, part))
        moves += [m for holding in shared for m in self._shared(holding) if m.dst_rank == rank]
        return sorted(moves)

    def out_of(self, rank: int) -> list[Move]:
        """What other ranks take from ``rank``, sorted."""
        if rank not in self.src:
            return []
        holding = self.src.key(rank), self.src.part(rank)
        if len(self.src.holders(*holding)) > 1:
            return sorted(m for m in self._shared(holding) if m.src_rank == rank)
        return sorted(
            Move(rank, reader, holding[1], box)
            for reader, box in self._needs(holding)
            if reader != rank
        )

    # --- who takes what -------------------------------------------------------------------------

    @staticmethod
    def _overlaps(cells: Cells, boxes: Sequence[Box]) -> Iterator[tuple[Key, Box]]:
        """Cells that meet ``boxes``, each with a common box."""
        for mine in boxes:
            for key in cells.meeting(mine):
                for theirs in cells.boxes(key):
                    common = mine.intersect(theirs)
                    if common is not None:
                        yield key, common

    def _needs(self, holding: _HoldingKey) -> Iterator[tuple[int, Box]]:
        """Every reader of a holding, and what it takes; holders too, that have it already."""
        for key, box in self._overlaps(self.dst, self.src.boxes(holding[0])):
            for reader in self.dst.holders(key, self._taker(key, holding)):
                yield reader, box

    def _taker(self, key: Key, holding: _HoldingKey) -> int:
        """The dst part of cell ``key`` that adds the src part of ``holding``."""
        parts = self.dst.parts
        if len(parts) == 1:
            return parts[0]
        if key not in self._takers:
            self._takers[key] = self._assigned(key)
        return self._takers[key][holding]

    def _assigned(self, key: Key) -> dict[_HoldingKey, int]:
        """Each src holding goes to one dst part: most holders in common, then least taken."""
        sizes: dict[Key, int] = {}
        for theirs, box in self._overlaps(self.src, self.dst.boxes(key)):
            sizes[theirs] = sizes.get(theirs, 0) + box.num_elements
        readers = {part: set(self.dst.holders(key, part)) for part in self.dst.parts}
        num_taken = dict.fromkeys(self.dst.parts, 0)
        out: dict[_HoldingKey, int] = {}
        for part in self.src.parts:
            for theirs in sorted(sizes):
                holders = set(self.src.holders(theirs, part))
                taker = min(readers, key=lambda p: (len(readers[p] - holders), num_taken[p], p))
                num_taken[taker] += sizes[theirs]
                out[theirs, part] = taker
        return out

    # --- who serves whom ------------------------------------------------------------------------

    def _shared(self, holding: _HoldingKey) -> list[Move]:
        """Moves that serve the needs of one holding of several ranks."""
        if holding not in self._shares:
            self._shares[holding] = list(self._served(holding))
        return self._shares[holding]

    def _served(self, holding: _HoldingKey) -> Iterator[Move]:
        holders = self.src.holders(*holding)
        own = frozenset(holders)
        near = [
            _by_home(holders, level, self.topology) for level in range(1, len(self.topology.levels))
        ]
        queues: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
        for reader, box in self._needs(holding):
            if reader in own:
                continue
            found = (
                homes.get(self.topology.home(level, reader)) for level, homes in enumerate(near, 1)
            )
            servers = next(filter(None, found), holders)
            queues.setdefault(servers, []).append((reader, box))
        for servers, queue in queues.items():
            hosts = _by_home(servers, 1, self.topology).values() if near else [servers]
            for server, reader, box in shared(sorted(hosts), sorted(queue)):
                yield Move(server, reader, holding[1], box)


def _by_home(ranks: Sequence[int], level: int, topology: Topology) -> dict[int, tuple[int, ...]]:
    """Ranks by the group of ``level`` that they are in."""
    homes: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        home = topology.home(level, rank)
        homes[home] = (*homes.get(home, ()), rank)
    return homes


_Share = tuple[int, int, Box]
"""(server, reader, what it takes)."""


def shared(hosts: Sequence[Sequence[int]], queue: Sequence[tuple[int, Box]]) -> Iterator[_Share]:
    """Divide what readers take among the servers of some hosts.

    Every host gives as much of the queue as it has servers. Inside a host each reader has a server
    of its own, if there are enough; else every server gives equally much.

    >>> [(server, reader) for server, reader, _ in shared([[0, 1], [2, 3]], [(7, Box((0,), (8,)))])]
    [(0, 7), (2, 7)]
    """
    num_servers = sum(map(len, hosts))
    total = sum(box.num_elements for _, box in queue)
    start = before = 0
    for servers in hosts:
        before += len(servers)
        stop = before * total // num_servers
        runs = list(_cut(queue, start, stop))
        readers = list(dict.fromkeys(reader for reader, _ in runs))
        if len(readers) <= len(servers):
            place = {r: servers[i * len(servers) // len(readers)] for i, r in enumerate(readers)}
            yield from ((place[reader], reader, box) for reader, box in runs)
        else:
            size = stop - start
            for i, server in enumerate(servers):
                low = start + i * size // len(servers)
                high = start + (i + 1) * size // len(servers)
                yield from ((server, reader, box) for reader, box in _cut(queue, low, high))
        start = stop


def _cut(queue: Sequence[tuple[int, Box]], low: int, high: int) -> Iterator[tuple[int, Box]]:
    """Elements ``low`` to ``high`` of boxes that are laid end to end."""
    position = 0
    for reader, box in queue:
        size = box.num_elements
        first, last = max(low - position, 0), min(high - position, size)
        if first < last:
            for piece in box.flat_range(first, last):
                yield reader, piece
        position += size
        if position >= high:
            break
