"""Memory: the state of a lowering: buffers, instructions, and where every shard lies now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rvdcomm.layout import Box, merged
from rvdcomm.planning.exchange import Move
from rvdcomm.program.instructions import Buffer, Copy, Entry, Instruction, Zero
from rvdcomm.program.regions import BoxIndex, is_filled, uncovered


class PiecePlace(NamedTuple):
    """The place of ``box`` of the current state: a piece of a buffer of ``rank``."""

    box: Box
    buffer: str
    piece: int
    rank: int

    def is_in(self, buffer: Buffer) -> bool:
        """Whether the place is in this buffer."""
        return (self.buffer, self.rank) == (buffer.name, buffer.rank)


class Arrival(NamedTuple):
    """A move and the ``place`` where the dst rank can then read its box, or a part of the box."""

    move: Move
    place: PiecePlace


class LoweredMemory:
    """Buffers of all ranks, instructions in order, and the places of the current state.

    Invariant: for every rank, the boxes of its places are disjoint and make up its shard; a place
    of another rank lies in staging memory of the same domain.

    ``step`` is the step of the path that is being lowered. ``converted`` are the names of shards
    whose dtype is not that of staging: only copies may read or write them. With ``staged`` every
    collective has buffers of its own.
    """

    def __init__(self, converted: frozenset[str] = frozenset(), staged: bool = False) -> None:
        self.converted = converted
        self.staged = staged
        self.buffers: dict[tuple[str, int], Buffer] = {}
        self.instructions: list[Instruction] = []
        self.where: dict[int, list[PiecePlace]] = {}
        self.step = 0
        self._num_names = 0
        # By rank: the list of places that was indexed, and its index.
        self._indices: dict[int, tuple[list[PiecePlace], BoxIndex]] = {}
        self._pieces: dict[int, tuple[Buffer, BoxIndex]] = {}

    def new_number(self) -> str:
        """A number for the names of the buffers of one exchange; the same on all ranks."""
        self._num_names += 1
        return str(self._num_names)

    def add_buffer(self, name: str, rank: int, pieces: Iterable[Box]) -> Buffer:
        """The buffer of this name and rank; it is added if it does not exist."""
        if (name, rank) not in self.buffers:
            self.buffers[name, rank] = Buffer(name, rank, tuple(pieces))
        return self.buffers[name, rank]

    def settle(self, name: str, rank: int, boxes: Sequence[Box]) -> None:
        """Record that the current shard of ``rank`` is buffer ``name``, piece by piece."""
        self.where[rank] = [PiecePlace(box, name, i, rank) for i, box in enumerate(boxes)]

    def find(self, rank: int, box: Box) -> list[tuple[PiecePlace, Box]]:
        """The places that together hold ``box``, and the part of it that each holds."""
        places = self.where.get(rank, [])
        known = self._indices.get(rank)
        if known is None or known[0] is not places:
            known = self._indices[rank] = places, BoxIndex([place.box for place in places])
        return [(places[i], common) for i, common in known[1].meeting(box)]

    def pieces(self, buffer: Buffer) -> BoxIndex:
        """An index of the pieces of a buffer."""
        known = self._pieces.get(id(buffer))
        if known is None:
            # The buffer is kept beside its index, so that its id is not reused.
            known = self._pieces[id(buffer)] = buffer, BoxIndex(buffer.pieces)
        return known[1]

    def arrivals_at_home(self, moves: Iterable[Move]) -> list[Arrival]:
        """The arrivals of moves from ranks to themselves, whose boxes stay where they are."""
        return [
            Arrival(Move(move.src_rank, move.dst_rank, move.part, box), place)
            for move in moves
            for place, box in self.find(move.src_rank, move.box)
        ]

    def copy(
        self, op: str, rank: int, dst: str, sources: Iterable[tuple[PiecePlace, Box, int]]
    ) -> None:
        """Copy or add boxes, each to a piece of ``dst``; one instruction per source buffer."""
        by_buffer: dict[tuple[str, int], list[Entry]] = {}
        for place, box, dst_piece in sources:
            key = place.buffer, place.rank
            by_buffer.setdefault(key, []).append(Entry(box, place.piece, dst_piece))
        for (src, src_rank), entries in by_buffer.items():
            step = self.step if src_rank != rank else 0
            self.instructions.append(Copy(op, rank, src, dst, tuple(entries), src_rank, step))

    def copy_shard(self, rank: int, buffer: Buffer) -> None:
        """Copy the current shard to ``buffer``, except the boxes that lie there already."""
        sources = [
            (place, common, i)
            for i, piece in enumerate(buffer.pieces)
            for place, common in self.find(rank, piece)
            if not place.is_in(buffer)
        ]
        self.copy("copy", rank, buffer.name, sources)

    def accumulate(
        self, rank: int, buffer: Buffer, arrivals: Iterable[Arrival], written: list[Box]
    ) -> None:
        """Add the arrivals in ascending order of parts; the first part of an element is copied.

        ``written`` are the disjoint boxes of ``buffer`` that have a value; the list is extended.
        """
        by_part: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            by_part.setdefault(arrival.move.part, []).append(arrival)
        pieces = self.pieces(buffer)
        for _, mine in sorted(by_part.items()):
            adds, copies, first = [], [], []
            known = BoxIndex(list(written))
            for arrival in mine:
                for piece, box in pieces.meeting(arrival.move.box):
                    fresh = known.uncovered(box)
                    first += fresh
                    copies += [(arrival.place, new, piece) for new in fresh]
                    adds += [(arrival.place, old, piece) for old in uncovered([box], fresh)]
            # Boxes that were received in place need no copy.
            self.copy("copy", rank, buffer.name, [c for c in copies if not c[0].is_in(buffer)])
            self.copy("add", rank, buffer.name, adds)
            written += first

    def zero_rest(
        self, rank: int, buffer: Buffer, boxes: Sequence[Box], written: Sequence[Box]
    ) -> None:
        """Zero the rest of ``boxes``; ``written`` are disjoint boxes inside them."""
        if is_filled(boxes, written):
            return
        pieces, known = self.pieces(buffer), BoxIndex(merged(written))
        holes = tuple(
            Entry(hole, 0, i)
            for box in boxes
            for i, piece in pieces.meeting(box)
            for hole in known.uncovered(piece)
        )
        if holes:
            self.instructions.append(Zero(rank, buffer.name, holes))
