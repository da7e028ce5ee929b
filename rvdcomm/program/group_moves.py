"""Group moves: the moves of one group become packs and one call of the backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.layout import Box
from rvdcomm.planning.exchange import Move
from rvdcomm.program.instructions import (
    NO_BUFFER,
    UNKNOWN_BUFFER,
    UNKNOWN_PIECE,
    Collective,
    Entry,
    Message,
)
from rvdcomm.program.memory import Arrival, LoweredMemory, Place
from rvdcomm.program.regions import BoxIndex, is_run

RankPair = tuple[int, int]
"""(src_rank, dst_rank)."""


@dataclass(frozen=True)
class Destination:
    """The state that a leg makes of one slice: where it is written, and who has to add.

    ``boxes`` are what every rank holds of the slice, ``pieces`` the pieces of the buffer ``name``.
    """

    name: str
    boxes: Mapping[int, tuple[Box, ...]]
    pieces: Mapping[int, tuple[Box, ...]]
    needs_sum: Mapping[int, bool]
    in_place: bool


@dataclass(frozen=True)
class GroupMoves:
    """The moves of one group, about to become a collective.

    ``moves`` are those of ``members``: the ranks of the group whose instructions are made. What
    other ranks do to their own memory stays unknown. ``name`` ends the names of new buffers.
    """

    memory: LoweredMemory
    target: Destination
    group: tuple[int, ...]
    members: tuple[int, ...]
    moves: tuple[Move, ...]
    fuse: bool
    is_gather: bool
    name: str

    @cached_property
    def by_pair(self) -> dict[RankPair, list[Move]]:
        """Moves by (src, dst), in the order in which they travel."""
        pairs: dict[RankPair, list[Move]] = {}
        for move in self.moves:
            pairs.setdefault((move.src_rank, move.dst_rank), []).append(move)
        return pairs

    def _has_own(self, rank: int) -> bool:
        """Whether a member sends to itself too: in a gather, or if that keeps its runs whole."""
        if self.is_gather or not self.fuse or self.memory.staged:
            return self.is_gather
        if (rank, rank) not in self.by_pair:
            return False
        for run in (self._run_to_send, self._run_to_receive):
            if run(rank, False) is None and run(rank, True) is not None:
                return True
        return False

    def emit(self, step: int) -> list[Arrival]:
        """Add the packs and the collective; returns where the members' moves lie afterwards."""
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
                arrivals += [Arrival(m, Place(m.box, name, slot, rank)) for m, slot in moves]
            if not has_own[rank]:
                arrivals += self.memory.arrivals_at_home(self.by_pair.get((rank, rank), []))
        messages = []
        for pair in sorted({*sent, *received}):
            boxes = [move.box for move in self.by_pair[pair]]
            unknown = [UNKNOWN_PIECE] * len(boxes)
            there, here = sent.get(pair, unknown), received.get(pair, unknown)
            messages.append(Message(*pair, tuple(map(Entry, boxes, there, here))))
        others = UNKNOWN_BUFFER, UNKNOWN_BUFFER
        src_names, dst_names = zip(*(names.get(rank, others) for rank in self.group), strict=True)
        kind = "all_gather" if self.is_gather else "all_to_all"
        self.memory.instructions.append(
            Collective(kind, step, self.group, src_names, dst_names, tuple(messages))
        )
        return arrivals

    # --- sending --------------------------------------------------------------------------------

    def _outgoing(self, rank: int, with_own: bool) -> Iterator[tuple[RankPair, list[Move]]]:
        for peer in self.group:
            if (rank, peer) in self.by_pair and (with_own or peer != rank):
                yield (rank, peer), self.by_pair[rank, peer]

    def _run_to_send(
        self, rank: int, with_own: bool
    ) -> tuple[str, dict[RankPair, list[int]]] | None:
        """The buffer and pieces to send from, if what is sent is one run of one buffer."""
        run: list[tuple[Place, Box]] = []
        pieces: dict[RankPair, list[int]] = {}
        for pair, moves in self._outgoing(rank, with_own):
            places = [self.memory.find(rank, move.box) for move in moves]
            if any(len(found) != 1 or found[0][0].rank != rank for found in places):
                return None
            pieces[pair] = [found[0][0].piece for found in places]
            # A gather sends one list of boxes to all.
            if not (self.is_gather and run):
                run += [(found[0][0], m.box) for found, m in zip(places, moves, strict=True)]
        names = {place.buffer for place, _ in run}
        if len(names) != 1 or names & self.memory.converted:
            return None
        (name,) = names
        memory = self.memory.buffers[name, rank].pieces
        in_order = is_run(memory, [(place.piece, box) for place, box in run])
        return (name, pieces) if in_order else None

    def _send(self, rank: int, with_own: bool) -> tuple[str, dict[RankPair, list[int]]]:
        """What ``rank`` sends from where; packed first if it is not one run already."""
        in_place = self.fuse and not self.memory.staged
        found = self._run_to_send(rank, with_own) if in_place else None
        if found is not None:
            return found
        packed: list[Box] = []
        pieces: dict[RankPair, list[int]] = {}
        for pair, moves in self._outgoing(rank, with_own):
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

    def _incoming(self, rank: int, with_own: bool) -> Iterator[tuple[RankPair, list[Move]]]:
        for peer in self.group:
            if (peer, rank) in self.by_pair and (with_own or peer != rank):
                yield (peer, rank), self.by_pair[peer, rank]

    def _run_to_receive(self, rank: int, with_own: bool) -> dict[RankPair, list[int]] | None:
        """Pieces of the new shard that the messages fill in order, if they are one run of it."""
        target = self.target
        if not target.in_place or rank not in target.pieces or target.needs_sum[rank]:
            return None
        shard = target.pieces[rank]
        index = BoxIndex(shard)
        pieces: dict[RankPair, list[int]] = {}
        run: list[tuple[int, Box]] = []
        for pair, moves in self._incoming(rank, with_own):
            for move in moves:
                inside = [i for i, common in index.meeting(move.box) if common == move.box]
                if not inside:
                    return None
                pieces.setdefault(pair, []).append(inside[0])
                run.append((inside[0], move.box))
        return pieces if is_run(shard, run) else None

    def _receive(self, rank: int, with_own: bool) -> tuple[str, dict[RankPair, list[int]]]:
        """Where ``rank`` receives: in the new shard's memory if it can, else in a buffer."""
        incoming = list(self._incoming(rank, with_own))
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
