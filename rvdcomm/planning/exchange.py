"""Exchange: the moves that take a tensor from any placement to any other (docs/exchange.md).

Every step of a path is defined by its moves. A rank's need is served from its own memory if
possible, else by holders on its own host, else by holders in its group of the next level outwards,
and in the end by all holders. The moves of one rank are computed from the two placements alone, in
a time that grows with the number of these moves. The whole exchange is the union over all ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rvdcomm.layout import Box, Ints
from rvdcomm.network import Topology
from rvdcomm.planning.cells import Cells, Key


class Move(NamedTuple):
    """``dst_rank`` takes ``box`` of value part ``part`` from ``src_rank`` (maybe itself)."""

    src_rank: int
    dst_rank: int
    part: int
    box: Box


_HoldingKey = tuple[Key, int]
"""(key, part): the cell and the value part that the ranks of ``Cells.holders`` hold."""

Share = tuple[int, int, int, int]
"""(server, reader, first, last): the server sends elements ``first`` to ``last`` of the need."""


class Exchange:
    """The moves from ``src`` to ``dst`` inside one group of ranks.

    A *holding* is one cell and one value part of src; its *holders* are the ranks that hold it. A
    *need* is the region that one reader takes from one holding. The holders that serve a need share
    it. All needs with the same servers form a queue, and every host serves a run of the queue in
    proportion to its number of servers. Inside a host, each reader has one server if there are
    enough servers. Compared with equal shares for all servers, this queue makes no port busier, and
    there are fewer messages (docs/exchange.md).

    Laws (tests/planning/test_exchange.py): every element of every dst shard gets every part once;
    with one part the busiest rank receives no more than it lacks; on one host no holder sends more
    than the larger of its equal share and the largest need of one reader; ``into`` and ``out_of``
    name the same moves.
    """

    def __init__(self, src: Cells, dst: Cells, topology: Topology) -> None:
        self.src, self.dst, self.topology = src, dst, topology
        self._takers: dict[Key, dict[_HoldingKey, int]] = {}
        self._known_turns: dict[Key, list[Sequence[int]] | None] = {}
        self._needs: dict[_HoldingKey, _Needs] = {}
        # By src cell, where the readers are the same for all parts.
        self._known_readers: dict[Key, tuple[Ints, Ints]] = {}

    def into(self, rank: int) -> list[Move]:
        """The moves to ``rank``, also those from its own memory, sorted."""
        if rank not in self.dst:
            return []
        key, own_part = self.dst.key(rank), self.dst.part(rank)
        own = (self.src.key(rank), self.src.part(rank)) if rank in self.src else None
        moves: list[Move] = []
        shared: dict[_HoldingKey, list[Box]] = {}
        for mine in self.dst.boxes(key):
            for theirs, box in self.src.overlaps(mine):
                for part in self.src.parts:
                    holding = theirs, part
                    if self._taker(key, holding) != own_part:
                        continue
                    if holding == own:
                        moves.append(Move(rank, rank, part, box))
                    elif self.src.num_replicas == 1:
                        (holder,) = self.src.holders(theirs, part)
                        moves.append(Move(holder, rank, part, box))
                    else:
                        shared.setdefault(holding, []).append(box)
        for holding, boxes in shared.items():
            boxes.sort()
            for server, _, first, last in self._needs_of(holding).queue_to(rank).into(rank):
                for box in _cut(boxes, first, last):
                    moves.append(Move(server, rank, holding[1], box))
        return sorted(moves)

    def out_of(self, rank: int) -> list[Move]:
        """The moves from ``rank`` to other ranks, sorted."""
        if rank not in self.src:
            return []
        holding = self.src.key(rank), self.src.part(rank)
        mine = self.src.boxes(holding[0])
        moves: list[Move] = []
        if self.src.num_replicas == 1:
            for key, box in (found for each in mine for found in self.dst.overlaps(each)):
                for reader in self.dst.holders(key, self._taker(key, holding)):
                    if reader != rank:
                        moves.append(Move(rank, reader, holding[1], box))
            return sorted(moves)
        for queue in self._needs_of(holding).queues_from(rank):
            for _, reader, first, last in queue.out_of(rank):
                own = self.dst.boxes(self.dst.key(reader))
                needed = sorted(
                    common for a in mine for b in own if (common := a.intersect(b)) is not None
                )
                for box in _cut(needed, first, last):
                    moves.append(Move(rank, reader, holding[1], box))
        return sorted(moves)

    # --- who takes what -------------------------------------------------------------------------

    def _taker(self, key: Key, holding: _HoldingKey) -> int:
        """The dst part of cell ``key`` to which the src part of ``holding`` is added."""
        parts = self.dst.parts
        if len(parts) == 1:
            return parts[0]
        turns = self._turns(key)
        if turns is not None:
            turn = self.src.parts.index(holding[1])
            for numbers, number in zip(turns, holding[0], strict=True):
                turn = turn * len(numbers) + bisect_left(numbers, number)
            return parts[turn % len(parts)]
        if key not in self._takers:
            self._takers[key] = self._assigned(key)
        return self._takers[key][holding]

    def _turns(self, key: Key) -> list[Sequence[int]] | None:
        """The src cells that overlap dst cell ``key``, as numbers per dim, if its parts take turns.

        The parts take holdings in turn if the src cells have equal shares of the dst cell and no
        rank is in both src and dst; otherwise the result is None.
        """
        if key not in self._known_turns:
            boxes = self.dst.boxes(key)
            is_even = self._is_apart and len(boxes) == 1
            self._known_turns[key] = self.src.equal_shares(boxes[0]) if is_even else None
        return self._known_turns[key]

    @cached_property
    def _is_apart(self) -> bool:
        """Whether no rank is in both src and dst."""
        return set(self.src.ranks).isdisjoint(self.dst.ranks)

    def _assigned(self, key: Key) -> dict[_HoldingKey, int]:
        """The dst part to which each src holding is added, for dst cell ``key``.

        It is the part that has most ranks in common with the holders. Among equal parts it is the
        part that has taken the fewest elements so far.
        """
        sizes: dict[Key, int] = {}
        for box in self.dst.boxes(key):
            for theirs, common in self.src.overlaps(box):
                sizes[theirs] = sizes.get(theirs, 0) + common.num_elements
        in_common: dict[_HoldingKey, dict[int, int]] = {}
        for part in self.dst.parts:
            for reader in self.dst.holders(key, part):
                if reader in self.src:
                    counts = in_common.setdefault(self._held(reader), {})
                    counts[part] = counts.get(part, 0) + 1
        num_taken = dict.fromkeys(self.dst.parts, 0)
        # A heap of (elements taken, part). An entry is dropped if its part has taken more since.
        least = [(0, part) for part in self.dst.parts]
        out: dict[_HoldingKey, int] = {}
        for part in self.src.parts:
            for theirs, size in sorted(sizes.items()):
                counts = in_common.get((theirs, part), {})
                if counts:
                    taker = min(counts, key=lambda p: (-counts[p], num_taken[p], p))
                else:
                    while least[0][0] != num_taken[least[0][1]]:
                        heappop(least)
                    taker = least[0][1]
                num_taken[taker] += size
                heappush(least, (num_taken[taker], taker))
                out[theirs, part] = taker
        return out

    def _held(self, rank: int) -> _HoldingKey:
        return self.src.key(rank), self.src.part(rank)

    # --- who serves whom ------------------------------------------------------------------------

    def _needs_of(self, holding: _HoldingKey) -> _Needs:
        if holding not in self._needs:
            holders = self.src.holders(*holding)
            self._needs[holding] = _Needs(self._readers(holding), holders, self.topology)
        return self._needs[holding]

    def _readers(self, holding: _HoldingKey) -> tuple[Ints, Ints]:
        """All readers of a holding (ascending, also holders), and how many elements each needs."""
        if holding[0] in self._known_readers:
            return self._known_readers[holding[0]]
        boxes = self.src.boxes(holding[0])
        if len(boxes) == len(self.dst.parts) == 1 and self.dst.is_regular:
            found = self.dst.readers(boxes[0], self.dst.parts[0])
            self._known_readers[holding[0]] = found
            return found
        sizes: dict[int, int] = {}
        for key, box in (found for mine in boxes for found in self.dst.overlaps(mine)):
            for reader in self.dst.holders(key, self._taker(key, holding)):
                sizes[reader] = sizes.get(reader, 0) + box.num_elements
        readers = sorted(sizes)
        return np.array(readers, np.int64), np.array([sizes[r] for r in readers], np.int64)


class _Needs:
    """The needs of one holding with several holders, as one queue per set of servers."""

    def __init__(
        self, needs: tuple[Ints, Ints], holders: Sequence[int], topology: Topology
    ) -> None:
        self._holders, self._topology = np.array(holders, np.int64), topology
        is_reader = ~_among(needs[0], self._holders)
        self._readers, self._sizes = needs[0][is_reader], needs[1][is_reader]
        # The level of the group that a reader shares with its servers; `_far`: all holders serve.
        self._far = len(topology.levels)
        self._level = np.full(len(self._readers), self._far)
        for level in reversed(range(1, self._far)):
            homes = np.sort(self._homes(level, self._holders))
            self._level[_among(self._homes(level, self._readers), homes)] = level
        self._queues: dict[tuple[int, int], Queue] = {}

    def queue_to(self, reader: int) -> Queue:
        """The queue that contains the need of ``reader``."""
        level = int(self._level[np.searchsorted(self._readers, reader)])
        return self._queue(level, reader)

    def queues_from(self, server: int) -> list[Queue]:
        """The queues that ``server`` serves."""
        return [self._queue(int(level), server) for level in np.unique(self._level)]

    def _queue(self, level: int, rank: int) -> Queue:
        """The queue whose servers are in the group of ``level`` that ``rank`` is in."""
        home = -1 if level == self._far else self._topology.home(level, rank)
        if (level, home) not in self._queues:
            servers, chosen = self._holders, self._level == level
            if home >= 0:
                servers = servers[self._homes(level, servers) == home]
                chosen &= self._homes(level, self._readers) == home
            hosts = [servers.tolist()] if self._far == 1 else self._hosts(servers)
            queue = Queue(hosts, self._readers[chosen].tolist(), self._sizes[chosen].tolist())
            self._queues[level, home] = queue
        return self._queues[level, home]

    def _hosts(self, servers: Ints) -> list[list[int]]:
        """Servers by host; hosts by their first server."""
        hosts: dict[int, list[int]] = {}
        homes = self._homes(1, servers).tolist()
        for server, home in zip(servers.tolist(), homes, strict=True):
            hosts.setdefault(home, []).append(server)
        return list(hosts.values())

    def _homes(self, level: int, ranks: Ints) -> Ints:
        runs = self._topology.runs
        if runs is None:
            home = self._topology.homes[level]
            return np.array([home[rank] for rank in ranks.tolist()], np.int64)
        found: Ints = (ranks - runs[level].first) // runs[level].size
        return found


def _among(values: Ints, members: Ints) -> NDArray[np.bool_]:
    """Whether each value is in ``members`` (ascending); ``np.isin`` takes ten times as long."""
    places = np.minimum(np.searchsorted(members, values), len(members) - 1)
    found: NDArray[np.bool_] = members[places] == values
    return found


class Queue:
    """Needs that have the same servers, laid end to end and divided among them.

    Every host serves a run of the queue in proportion to its number of servers. Inside a host, each
    reader has a server of its own if there are enough servers; otherwise all servers give equal
    shares. Readers ascend.

    >>> [(server, reader) for server, reader, *_ in Queue([[0, 1], [2, 3]], [7], [8])]
    [(0, 7), (2, 7)]
    """

    def __init__(
        self, hosts: Sequence[Sequence[int]], readers: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self._servers = [server for host in hosts for server in host]
        self._bounds = list(accumulate(map(len, hosts), initial=0))
        self._readers, self._ends = readers, list(accumulate(sizes, initial=0))

    def __iter__(self) -> Iterator[Share]:
        for host in range(len(self._bounds) - 1):
            yield from self._shares(host, range(len(self._servers)), range(len(self._readers)))

    def into(self, reader: int) -> Iterator[Share]:
        """The shares that ``reader`` takes."""
        i = bisect_left(self._readers, reader)
        host = bisect_right(range(len(self._bounds)), self._ends[i], key=self._start) - 1
        while host < len(self._bounds) - 1 and self._start(host) < self._ends[i + 1]:
            yield from self._shares(host, range(len(self._servers)), range(i, i + 1))
            host += 1

    def out_of(self, server: int) -> Iterator[Share]:
        """The shares that ``server`` gives."""
        place = self._servers.index(server)
        host = bisect_right(self._bounds, place) - 1
        return self._shares(host, range(place, place + 1), range(len(self._readers)))

    def _start(self, host: int) -> int:
        """The first element of a host's run in the queue."""
        return self._bounds[host] * self._ends[-1] // len(self._servers)

    def _shares(self, host: int, places: range, readers: range) -> Iterator[Share]:
        """The shares that the servers of ``host`` at ``places`` give to some ``readers``."""
        low, high = self._start(host), self._start(host + 1)
        base = self._bounds[host]
        num_servers = self._bounds[host + 1] - base
        first = bisect_right(self._ends, low) - 1
        num_readers = bisect_left(self._ends, high) - first
        if num_readers <= num_servers:
            # Reader i has its own server: place base + (i - first) * num_servers // num_readers.
            begin = first + -(-(places.start - base) * num_readers // num_servers)
            end = first + -(-(places.stop - base) * num_readers // num_servers)
            for i in range(
                max(begin, readers.start, first), min(end, readers.stop, first + num_readers)
            ):
                place = base + (i - first) * num_servers // num_readers
                yield self._share(place, i, low, high)
            return

        def cut(place: int) -> int:
            return low + (place - base) * (high - low) // num_servers

        a, b = max(low, self._ends[readers.start]), min(high, self._ends[readers.stop])
        begin = bisect_right(range(base + num_servers), a, lo=base, key=cut) - 1
        for place in range(max(begin, places.start), min(base + num_servers, places.stop)):
            a, b = cut(place), cut(place + 1)
            if a >= self._ends[readers.stop]:
                break
            i = max(bisect_right(self._ends, a) - 1, readers.start)
            while i < readers.stop and self._ends[i] < b:
                yield self._share(place, i, a, b)
                i += 1

    def _share(self, place: int, i: int, low: int, high: int) -> Share:
        """The share of the i-th reader in elements ``low`` to ``high`` of the queue."""
        begin, end = self._ends[i], self._ends[i + 1]
        first, last = max(low, begin) - begin, min(high, end) - begin
        return self._servers[place], self._readers[i], first, last


def _cut(boxes: Iterable[Box], low: int, high: int) -> Iterator[Box]:
    """Elements ``low`` to ``high`` of boxes that are laid end to end."""
    position = 0
    for box in boxes:
        size = box.num_elements
        first, last = max(low - position, 0), min(high - position, size)
        if first < last:
            yield from box.flat_range(first, last)
        position += size
