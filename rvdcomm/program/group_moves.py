"""Group moves: lower the moves of one group of ranks to packs and one call of the backend."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.layout import Box
from rvdcomm.planning.exchange import Move
from rvdcomm.program.instructions import (
    NO_BUFFER,
    UNKNOWN_BUFFER,
    UNKNOWN_PIECE,
    Buffer,
    Collective,
    Entry,
    Message,
)
from rvdcomm.program.memory import Arrival, LoweredMemory, PiecePlace
from rvdcomm.program.regions import BoxIndex, is_run

RankPair = tuple[int, int]
"""(src_rank, dst_rank)."""


@dataclass(frozen=True)
class Destination:
    """The buffers in which the new state of one slice is written after an exchange.

    By rank, ``boxes`` are the boxes of the slice that the rank holds, and ``pieces`` are the pieces
    of its buffer ``name``. ``needs_sum`` says which ranks have to add parts. ``in_place`` allows
    messages to arrive in the buffer itself.
    """

    name: str
    boxes: Mapping[int, tuple[Box, ...]]
    pieces: Mapping[int, tuple[Box, ...]]
    needs_sum: Mapping[int, bool]
    in_place: bool


@dataclass(frozen=True)
class GroupMoves:
    """The moves of one group, to be lowered to one collective.

    ``members`` are the ranks of the group that are lowered, and ``moves`` are their moves. The
    buffers of other ranks stay unknown. ``name`` is the suffix of the names of new buffers.
    """

    memory: LoweredMemory
    target: Destination
    group: tuple[int, ...]
    members: tuple[int, ...]
    moves: tuple[Move, ...]
    is_gather: bool
    name: str

    @cached_property
    def by_pair(self) -> dict[RankPair, list[Move]]:
        """Moves by (src_rank, dst_rank), in the order in which they are sent."""
        pairs: dict[RankPair, list[Move]] = {}
        for move in self.moves:
            pairs.setdefault((move.src_rank, move.dst_rank), []).append(move)
        return pairs

    @cached_property
    def _pairs_of(self) -> tuple[dict[int, list[RankPair]], dict[int, list[RankPair]]]:
        """The pairs of every member as src, and as dst, in the order of the group's ranks."""
        found: tuple[dict[int, list[RankPair]], dict[int, list[RankPair]]] = {}, {}
        for pair in sorted(self.by_pair):
            for side, rank in zip(found, pair, strict=True):
                side.setdefault(rank, []).append(pair)
        return found

    def _moves_of(
        self, side: int, rank: int, with_own: bool
    ) -> Iterator[tuple[RankPair, list[Move]]]:
        """What a member sends (side 0), or receives (side 1), by pair."""
        for pair in self._pairs_of[side].get(rank, ()):
            if with_own or pair != (rank, rank):
                yield pair, self.by_pair[pair]

    def _has_own(self, rank: int) -> bool:
        """Whether a member also sends to itself: in a gather, or if only this makes one run."""
        if self.is_gather or self.memory.staged:
            return self.is_gather
        if (rank, rank) not in self.by_pair:
            return False
        for run in (self._run_to_send, self._run_to_receive):
            if run(rank, False) is None and run(rank, True) is not None:
                return True
        return False

    def emit(self, step: int) -> list[Arrival]:
        """Emit packs and the collective; returns where the members find the moved boxes then."""
        names: dict[int, tuple[str, str]] = {}
        arrivals: list[Arrival] = []
        sent: dict[RankPair, list[int]] = {}
        received: dict[RankPair, list[int]] = {}
        has_own = {rank: self._has_own(rank) for rank in self.members}
        for rank in self.members:
            src, pieces = self._send(rank, has_own[rank])
            names[rank] = src, NO_BUFFER
            sent.update(pieces)
        for rank in self.members:
            name, pieces = self._receive(rank, has_own[rank])
            names[rank] = names[rank][0], name
            received.update(pieces)
            for pair, slots in pieces.items():
                moves = zip(self.by_pair[pair], slots, strict=True)
                arrivals += [Arrival(m, PiecePlace(m.box, name, slot, rank)) for m, slot in moves]
            if not has_own[rank]:
                arrivals += self.memory.arrivals_at_home(self.by_pair.get((rank, rank), []))
        messages = []
        for pair in sorted({*sent, *received}):
            boxes = [move.box for move in self.by_pair[pair]]
            unknown = [UNKNOWN_PIECE] * len(boxes)
            there, here = sent.get(pair, unknown), received.get(pair, unknown)
            messages.append(Message(*pair, tuple(map(Entry, boxes, there, here))))
        src_names = [UNKNOWN_BUFFER] * len(self.group)
        dst_names = [UNKNOWN_BUFFER] * len(self.group)
        for rank, (src, dst) in names.items():
            place = bisect_left(self.group, rank)
            src_names[place], dst_names[place] = src, dst
        kind = "all_gather" if self.is_gather else "all_to_all"
        self.memory.instructions.append(
            Collective(kind, step, self.group, tuple(src_names), tuple(dst_names), tuple(messages))
        )
        return arrivals

    # --- sending --------------------------------------------------------------------------------

    def _run_to_send(
        self, rank: int, with_own: bool
    ) -> tuple[str, dict[RankPair, list[int]]] | None:
        """The buffer and its pieces to send from, if all sent boxes are one run of one buffer."""
        memory = self.memory
        names: set[str] = set()
        pieces: dict[RankPair, list[int]] = {}

        def parts() -> Iterator[tuple[Buffer, int, Box] | None]:
            for pair, moves in self._moves_of(0, rank, with_own):
                if self.is_gather and pieces:
                    # A gather sends the same list of boxes to all ranks.
                    pieces[pair] = next(iter(pieces.values()))
                    continue
                pieces[pair] = []
                for move in moves:
                    found = memory.find(rank, move.box)
                    place = found[0][0]
                    if len(found) > 1 or place.rank != rank or place.buffer in memory.converted:
                        yield None
                    names.add(place.buffer)
                    pieces[pair].append(place.piece)
                    yield memory.buffers[place.buffer, rank], place.piece, move.box

        return (names.pop(), pieces) if is_run(parts()) and names else None

    def _send(self, rank: int, with_own: bool) -> tuple[str, dict[RankPair, list[int]]]:
        """The buffer and its pieces that ``rank`` sends; boxes that are not one run are packed."""
        found = None if self.memory.staged else self._run_to_send(rank, with_own)
        if found is not None:
            return found
        packed: list[Box] = []
        pieces: dict[RankPair, list[int]] = {}
        for pair, moves in self._moves_of(0, rank, with_own):
            start = 0 if self.is_gather else len(packed)
            pieces[pair] = [start + i for i in range(len(moves))]
            if start == len(packed):
                packed += [move.box for move in moves]
        if not packed:
            return NO_BUFFER, {}
        buffer = self.memory.add_buffer(f"s{self.name}", rank, packed)
        sources = [
            (place, box, i)
            for i, piece in enumerate(packed)
            for place, box in self.memory.find(rank, piece)
        ]
        self.memory.copy("copy", rank, buffer.name, sources)
        return buffer.name, pieces

    # --- receiving ------------------------------------------------------------------------------

    def _run_to_receive(self, rank: int, with_own: bool) -> dict[RankPair, list[int]] | None:
        """Pieces of the new shard that the messages fill in order, if these are one run of it."""
        target = self.target
        if not target.in_place or rank not in target.pieces or target.needs_sum[rank]:
            return None
        shard = Buffer(target.name, rank, target.pieces[rank])
        index = BoxIndex(shard.pieces)
        pieces: dict[RankPair, list[int]] = {}

        def parts() -> Iterator[tuple[Buffer, int, Box] | None]:
            for pair, moves in self._moves_of(1, rank, with_own):
                for move in moves:
                    inside = [i for i, common in index.meeting(move.box) if common == move.box]
                    if not inside:
                        yield None
                    pieces.setdefault(pair, []).append(inside[0])
                    yield shard, inside[0], move.box

        return pieces if is_run(parts()) else None

    def _receive(self, rank: int, with_own: bool) -> tuple[str, dict[RankPair, list[int]]]:
        """The buffer and its pieces into which ``rank`` receives: the new shard if possible."""
        incoming = list(self._moves_of(1, rank, with_own))
        if not incoming:
            return NO_BUFFER, {}
        found = self._run_to_receive(rank, with_own)
        if found is not None:
            self.memory.add_buffer(self.target.name, rank, self.target.pieces[rank])
            return self.target.name, found
        boxes: list[Box] = []
        pieces: dict[RankPair, list[int]] = {}
        for pair, moves in incoming:
            pieces[pair] = [len(boxes) + i for i in range(len(moves))]
            boxes += [move.box for move in moves]
        return self.memory.add_buffer(f"r{self.name}", rank, boxes).name, pieces
