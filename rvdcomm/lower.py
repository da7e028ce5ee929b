"""Lowering: from a path to a program, fusing what needs no memory traffic of its own.

While it walks the steps, the lowering knows for every rank *where* each region of the current state
lies. So a slice is free, an unpack merges with the next pack, contiguous pieces are sent and
received in place, and a state is only written out where parts are added or where it is ``dst``.
With ``fuse=False`` every step packs, sends, unpacks: the plain meaning, for tests to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rvdcomm.box import Box
from rvdcomm.dtypes import SUMMED_BY_BACKENDS
from rvdcomm.exchange import Move
from rvdcomm.path import Path, State, Step
from rvdcomm.placement import Holding
from rvdcomm.program import (
    DST,
    NO_BUFFER,
    SRC,
    Buffer,
    Collective,
    Copy,
    Entry,
    Instruction,
    Message,
    Program,
    Zero,
)
from rvdcomm.topology import Topology


@dataclass(frozen=True, slots=True)
class _Place:
    """``box`` of the current state lies in a piece of a buffer."""

    box: Box
    buffer: str
    piece: int


def lower(path: Path, dtype: str, topology: Topology, *, fuse: bool = True) -> Program:
    """The program that runs ``path`` on tensors of ``dtype``.

    Law (tests/test_lower.py): it verifies, and gives the same data with and without ``fuse``.
    """
    return _Lowering(path, dtype, topology, fuse).program()


class _Lowering:
    """State of one lowering: buffers, instructions, and where every rank's current shard lies."""

    def __init__(self, path: Path, dtype: str, topology: Topology, fuse: bool) -> None:
        self.path, self.dtype, self.topology, self.fuse = path, dtype, topology, fuse
        self.buffers: dict[tuple[str, int], Buffer] = {}
        self.instructions: list[Instruction] = []
        self.where: dict[int, list[_Place]] = {}
        self.num_names = 0

    def program(self) -> Program:
        src, dst = self.path.src, self.path.dst
        for name, layout in ((SRC, src), (DST, dst)):
            for rank in sorted(layout.ranks):
                self._add_buffer(name, rank, (layout.cell(rank).box,))
        self.where = {rank: [_Place(src.cell(rank).box, SRC, 0)] for rank in src.ranks}
        for index, step in enumerate(self.path.steps):
            is_last = index == len(self.path.steps) - 1
            if step.kind == "all_reduce" and self._backend_sums(step):
                self._all_reduce(index, step, is_last)
                continue
            legs = list(zip(step.legs, step.moves(self.topology), strict=True))
            for i, ((_, state), moves) in enumerate(legs, start=1):
                self._leg(index, step, state, moves, is_last and i == len(legs))
        for rank in dst.ranks:
            self._finish(rank)
        return Program(src, dst, self.dtype, tuple(self.buffers.values()), tuple(self.instructions))

    # --- buffers and copies ---------------------------------------------------------------------

    def _add_buffer(self, name: str, rank: int, pieces: Iterable[Box]) -> str:
        self.buffers[name, rank] = Buffer(name, rank, tuple(pieces))
        return name

    def _name(self, prefix: str) -> str:
        self.num_names += 1
        return f"{prefix}{self.num_names}"

    def _copies(
        self, op: str, rank: int, dst: str, sources: Iterable[tuple[_Place, Box, int]]
    ) -> None:
        """Copy or add boxes, each from a place into a piece of ``dst``; one instruction a source."""
        by_buffer: dict[str, list[Entry]] = {}
        for place, box, dst_piece in sources:
            by_buffer.setdefault(place.buffer, []).append(Entry(box, place.piece, dst_piece))
        for src, entries in by_buffer.items():
            self.instructions.append(Copy(op, rank, src, dst, tuple(entries)))

    def _found(self, rank: int, box: Box) -> list[tuple[_Place, Box]]:
        """Places that together hold ``box`` of the current state."""
        found = [(place, place.box.intersect(box)) for place in self.where.get(rank, [])]
        return [(place, common) for place, common in found if common is not None]

    def _finish(self, rank: int) -> None:
        """Copy what does not lie in dst yet, and zero what no part came for."""
        place = _Place(self.buffers[DST, rank].pieces[0], DST, 0)
        todo = [(p, p.box, 0) for p in self.where.get(rank, []) if p.buffer != DST]
        self._copies("copy", rank, DST, todo)
        missing = _uncovered([place.box], [p.box for p in self.where.get(rank, [])])
        if missing:
            self.instructions.append(Zero(rank, DST, tuple(Entry(box, 0, 0) for box in missing)))

    # --- one leg of a step ----------------------------------------------------------------------

    def _leg(
        self, index: int, step: Step, dst: State, moves: tuple[Move, ...], is_last: bool
    ) -> None:
        """Move the current state to ``dst``."""
        holdings = {rank: dst.placement.by_rank[rank] for rank in dst.placement.ranks}
        arriving: dict[int, list[Move]] = {rank: [] for rank in holdings}
        for move in moves:
            arriving[move.dst_rank].append(move)
        needs_sum = {rank: _overlap(found) for rank, found in arriving.items()}
        places: dict[int, list[tuple[Move, _Place]]] = {rank: [] for rank in holdings}
        state_name = DST if is_last else self._name("x")
        out = _Output(state_name, holdings, needs_sum, self.fuse and step.num_slices == 1)
        if step.num_slices > 1:
            self._windows(index, step, moves, out)
            return
        for group in _components(moves):
            members = [m for m in moves if m.dst_rank in group or m.src_rank in group]
            if len(group) > 1:
                for move, place in self._collective(index, step, group, members, out):
                    places[move.dst_rank].append((move, place))
            else:
                for move in members:
                    for place, box in self._found(move.src_rank, move.box):
                        part = Move(move.src_rank, move.dst_rank, move.part, box)
                        places[move.dst_rank].append((part, place))
        where: dict[int, list[_Place]] = {}
        for rank, holding in holdings.items():
            must_write = needs_sum[rank] or not self.fuse
            if must_write or not _covers(holding.boxes, [m.box for m, _ in places[rank]]):
                where[rank] = self._write(rank, holding, places[rank], out)
            else:
                where[rank] = [_Place(m.box, p.buffer, p.piece) for m, p in places[rank]]
        self.where = where

    def _collective(
        self, index: int, step: Step, group: tuple[int, ...], moves: list[Move], out: _Output
    ) -> list[tuple[Move, _Place]]:
        """One call for ``group``; returns where every move's box lies afterwards."""
        by_pair: dict[tuple[int, int], list[Move]] = {}
        for move in sorted(moves, key=lambda m: (m.src_rank, m.dst_rank, m.part, m.box)):
            by_pair.setdefault((move.src_rank, move.dst_rank), []).append(move)
        # A rank's own piece travels with the call if that keeps a run whole; else it stays put.
        is_gather = _is_gather(group, by_pair)
        with_own = is_gather or (
            self.fuse
            and all(self._send_run(rank, group, by_pair, True, False) is not None for rank in group)
        )
        with_own = with_own or (
            self.fuse
            and all(out.receive_run(rank, group, by_pair, True) is not None for rank in group)
        )
        messages: dict[tuple[int, int], list[tuple[Box, int]]] = {}
        src_names = []
        for rank in group:
            name, pieces = self._send(rank, group, by_pair, with_own, is_gather)
            src_names.append(name)
            messages.update(pieces)
        dst_names, entries, places = [], {}, []
        for rank in group:
            name, slots = self._receive(rank, group, by_pair, with_own, out)
            dst_names.append(name)
            for pair, dst_pieces in slots.items():
                entries[pair] = tuple(
                    Entry(box, src_piece, dst_piece)
                    for (box, src_piece), dst_piece in zip(messages[pair], dst_pieces, strict=True)
                )
                places += [
                    (move, _Place(move.box, name, piece))
                    for move, piece in zip(by_pair[pair], dst_pieces, strict=True)
                ]
            if not with_own:
                for move in by_pair.get((rank, rank), []):
                    for place, box in self._found(rank, move.box):
                        places.append((Move(rank, rank, move.part, box), place))
        kind = "all_gather" if is_gather else "all_to_all"
        calls = tuple(Message(a, b, entries[a, b]) for a, b in sorted(entries))
        self.instructions.append(
            Collective(kind, index, group, tuple(src_names), tuple(dst_names), calls)
        )
        return places

    def _send_run(
        self,
        rank: int,
        group: tuple[int, ...],
        by_pair: dict[tuple[int, int], list[Move]],
        with_own: bool,
        is_gather: bool,
    ) -> tuple[str, dict[tuple[int, int], list[tuple[Box, int]]]] | None:
        """The buffer and pieces to send from, if what is sent is one run of one buffer."""
        run: list[tuple[_Place, Box]] = []
        pieces: dict[tuple[int, int], list[tuple[Box, int]]] = {}
        for peer in group:
            if peer == rank and not with_own:
                continue
            for move in by_pair.get((rank, peer), []):
                found = self._found(rank, move.box)
                if len(found) != 1:
                    return None
                pieces.setdefault((rank, peer), []).append((move.box, found[0][0].piece))
                if not is_gather or peer == group[0]:
                    run.append((found[0][0], move.box))
        if not run or len({place.buffer for place, _ in run}) != 1:
            return None
        buffer = self.buffers[run[0][0].buffer, rank]
        if not _is_run(buffer, [(place.piece, box) for place, box in run]):
            return None
        return buffer.name, pieces

    def _send(
        self,
        rank: int,
        group: tuple[int, ...],
        by_pair: dict[tuple[int, int], list[Move]],
        with_own: bool,
        is_gather: bool,
    ) -> tuple[str, dict[tuple[int, int], list[tuple[Box, int]]]]:
        """What ``rank`` sends from where; packs it first if it is not one run already."""
        if self.fuse:
            found = self._send_run(rank, group, by_pair, with_own, is_gather)
            if found is not None:
                return found
        pieces: dict[tuple[int, int], list[tuple[Box, int]]] = {}
        packed: list[Box] = []
        for peer in group:
            moves = by_pair.get((rank, peer), [])
            if not moves or (peer == rank and not with_own):
                continue
            if is_gather and packed:
                pieces[rank, peer] = [(move.box, i) for i, move in enumerate(moves)]
                continue
            pieces[rank, peer] = [(m.box, len(packed) + i) for i, m in enumerate(moves)]
            packed += [move.box for move in moves]
        if not packed:
            return NO_BUFFER, {}
        name = self._add_buffer(self._name("s"), rank, packed)
        sources = [
            (place, box, i)
            for i, piece in enumerate(packed)
            for place, box in self._found(rank, piece)
        ]
        self._copies("copy", rank, name, sources)
        return name, pieces

    def _receive(
        self,
        rank: int,
        group: tuple[int, ...],
        by_pair: dict[tuple[int, int], list[Move]],
        with_own: bool,
        out: _Output,
    ) -> tuple[str, dict[tuple[int, int], list[int]]]:
        """Where ``rank`` receives: in the state's own memory if that is one run, else in a buffer."""
        peers = [peer for peer in group if (peer, rank) in by_pair and (with_own or peer != rank)]
        if not peers:
            return NO_BUFFER, {}
        run = out.receive_run(rank, group, by_pair, with_own)
        if run is not None:
            if (out.name, rank) not in self.buffers:
                self._add_buffer(out.name, rank, out.holdings[rank].boxes)
            return out.name, run
        slots: dict[tuple[int, int], list[int]] = {}
        pieces: list[Box] = []
        for peer in peers:
            moves = by_pair[peer, rank]
            slots[peer, rank] = [len(pieces) + i for i in range(len(moves))]
            pieces += [move.box for move in moves]
        return self._add_buffer(self._name("r"), rank, pieces), slots

    def _write(
        self, rank: int, holding: Holding, arrived: list[tuple[Move, _Place]], out: _Output
    ) -> list[_Place]:
        """Write a rank's new shard: the first part of every element is copied, the rest is added."""
        self._ensure_state(rank, out)
        self._accumulate(rank, holding, arrived, [], out.name)
        self._zero_rest(rank, holding, [m.box for m, _ in arrived], out.name)
        return [_Place(box, out.name, i) for i, box in enumerate(holding.boxes)]

    def _ensure_state(self, rank: int, out: _Output) -> None:
        if (out.name, rank) not in self.buffers:
            self._add_buffer(out.name, rank, out.holdings[rank].boxes)

    def _accumulate(
        self,
        rank: int,
        holding: Holding,
        arrived: list[tuple[Move, _Place]],
        written: list[Box],
        name: str,
    ) -> None:
        """Add what arrived, in ascending order of parts; ``written`` grows by what is written."""
        for part in sorted({move.part for move, _ in arrived}):
            mine = [(m, p) for m, p in arrived if m.part == part]
            adds, copies = [], []
            for move, place in mine:
                for piece, box in _pieces_of(holding.boxes, move.box):
                    fresh = _uncovered([box], written)
                    copies += [(place, new, piece) for new in fresh]
                    adds += [(place, old, piece) for old in _uncovered([box], fresh)]
            self._copies("copy", rank, name, [c for c in copies if c[0].buffer != name])
            self._copies("add", rank, name, adds)
            written += [move.box for move, _ in mine]

    def _zero_rest(self, rank: int, holding: Holding, written: list[Box], name: str) -> None:
        zeros = [
            Entry(hole, 0, i)
            for i, box in enumerate(holding.boxes)
            for hole in _uncovered([box], written)
        ]
        if zeros:
            self.instructions.append(Zero(rank, name, tuple(zeros)))

    # --- special steps --------------------------------------------------------------------------

    def _windows(self, index: int, step: Step, moves: tuple[Move, ...], out: _Output) -> None:
        """An exchange in windows: each sends one slice of every move, then frees its staging."""
        written: dict[int, list[Box]] = {rank: [] for rank in out.holdings}
        # Part by part, so that sums keep their order of parts whatever the windows are.
        parts = sorted({move.part for move in moves})
        for part in parts:
            for window in range(step.num_slices):
                sliced = [
                    Move(m.src_rank, m.dst_rank, m.part, box)
                    for m in moves
                    if m.part == part
                    for box in _slice(m.box, window, step.num_slices)
                ]
                arrived: dict[int, list[tuple[Move, _Place]]] = {}
                for group in _components(sliced):
                    members = [m for m in sliced if m.dst_rank in group]
                    if len(group) > 1:
                        for move, place in self._collective(index, step, group, members, out):
                            arrived.setdefault(move.dst_rank, []).append((move, place))
                        continue
                    for move in members:
                        for place, box in self._found(move.src_rank, move.box):
                            mine = Move(move.src_rank, move.dst_rank, move.part, box)
                            arrived.setdefault(move.dst_rank, []).append((mine, place))
                for rank, found in sorted(arrived.items()):
                    self._ensure_state(rank, out)
                    self._accumulate(rank, out.holdings[rank], found, written[rank], out.name)
        self.where = {}
        for rank, holding in out.holdings.items():
            self._ensure_state(rank, out)
            self._zero_rest(rank, holding, written[rank], out.name)
            self.where[rank] = [_Place(box, out.name, i) for i, box in enumerate(holding.boxes)]

    def _backend_sums(self, step: Step) -> bool:
        """Whether the backend's all_reduce keeps our promise of equal bits on all replicas.

        A backend sums in its own fixed order of ranks: where the order of ranks is the order of
        parts in every group, equal parts are summed in equal order in all of them.
        """
        part = {rank: h.part for rank, h in step.src.placement.by_rank.items()}
        return self.dtype in SUMMED_BY_BACKENDS and all(
            [part[rank] for rank in group] == sorted({part[rank] for rank in group})
            for group in step.groups
        )

    def _all_reduce(self, index: int, step: Step, is_last: bool) -> None:
        """Copy the shard to where the result goes and let the backend sum in place."""
        name = DST if is_last else self._name("x")
        for group in step.groups:
            messages = []
            for rank in group:
                boxes = step.dst.placement.by_rank[rank].boxes
                if (name, rank) not in self.buffers:
                    self._add_buffer(name, rank, boxes)
                sources = [
                    (place, common, i)
                    for i, box in enumerate(boxes)
                    for place, common in self._found(rank, box)
                ]
                self._copies("copy", rank, name, sources)
                whole = tuple(Entry(box, i, i) for i, box in enumerate(boxes))
                messages.append(Message(rank, rank, whole))
            names = (name,) * len(group)
            if messages[0].num_elements:
                self.instructions.append(
                    Collective("all_reduce", index, group, names, names, tuple(messages))
                )
        self.where = {
            rank: [_Place(box, name, i) for i, box in enumerate(holding.boxes)]
            for rank, holding in step.dst.placement.by_rank.items()
        }


@dataclass(frozen=True)
class _Output:
    """The state that a leg leaves: its buffer's name and every rank's shard."""

    name: str
    holdings: dict[int, Holding]
    needs_sum: dict[int, bool]
    in_place: bool

    def receive_run(
        self,
        rank: int,
        group: tuple[int, ...],
        by_pair: dict[tuple[int, int], list[Move]],
        with_own: bool,
    ) -> dict[tuple[int, int], list[int]] | None:
        """Pieces of the new shard that the messages fill in order, if they are one run of it."""
        if not self.in_place or rank not in self.holdings or self.needs_sum[rank]:
            return None
        boxes = self.holdings[rank].boxes
        slots: dict[tuple[int, int], list[int]] = {}
        run: list[tuple[int, Box]] = []
        for peer in group:
            if peer == rank and not with_own:
                continue
            for move in by_pair.get((peer, rank), []):
                found = [i for i, box in enumerate(boxes) if box.contains(move.box)]
                if not found:
                    return None
                slots.setdefault((peer, rank), []).append(found[0])
                run.append((found[0], move.box))
        return slots if _is_run(Buffer("", rank, boxes), run) else None


def _is_run(buffer: Buffer, run: Sequence[tuple[int, Box]]) -> bool:
    """Whether these boxes lie one after another, each contiguous."""
    end: int | None = None
    for piece, box in run:
        inner = box.flat_offset_within(buffer.pieces[piece])
        if inner is None:
            return False
        start = buffer.offset(piece) + inner
        if end is not None and start != end:
            return False
        end = start + box.num_elements
    return True


def _is_gather(group: tuple[int, ...], by_pair: dict[tuple[int, int], list[Move]]) -> bool:
    """Whether every rank sends the same boxes to all ranks, and equally much as every other."""
    sizes = set()
    for rank in group:
        sent = [[m.box for m in by_pair.get((rank, peer), [])] for peer in group]
        if not sent[0] or any(boxes != sent[0] for boxes in sent):
            return False
        sizes.add(sum(box.num_elements for box in sent[0]))
    return len(sizes) == 1


def _components(moves: Iterable[Move]) -> list[tuple[int, ...]]:
    """Ranks that are joined by moves, each component ascending."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        parent.setdefault(rank, rank)
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for move in moves:
        a, b = root(move.src_rank), root(move.dst_rank)
        parent[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for rank in sorted(parent):
        groups.setdefault(root(rank), []).append(rank)
    return [tuple(group) for group in groups.values()]


def _overlap(moves: list[Move]) -> bool:
    """Whether an element arrives in more than one part."""
    parts = {move.part for move in moves}
    if len(parts) < 2:
        return False
    seen: list[Box] = []
    for part in sorted(parts):
        mine = [move.box for move in moves if move.part == part]
        if any(box.intersect(other) for box in mine for other in seen):
            return True
        seen += mine
    return False


def _uncovered(boxes: Iterable[Box], by: Sequence[Box]) -> list[Box]:
    """What of ``boxes`` no box of ``by`` covers."""
    left = [box for box in boxes if not box.is_empty]
    for cover in by:
        left = [rest for box in left for rest in box.subtract(cover)]
    return left


def _covers(boxes: tuple[Box, ...], by: list[Box]) -> bool:
    """Whether disjoint boxes ``by`` fill ``boxes``."""
    return sum(b.num_elements for b in by) == sum(b.num_elements for b in boxes)


def _pieces_of(boxes: tuple[Box, ...], box: Box) -> list[tuple[int, Box]]:
    """The parts of ``box`` in every piece."""
    found = [(i, piece.intersect(box)) for i, piece in enumerate(boxes)]
    return [(i, common) for i, common in found if common is not None]


def _slice(box: Box, window: int, num_slices: int) -> Iterable[Box]:
    """The boxes of one of ``num_slices`` equal runs of ``box``."""
    n = box.num_elements
    return box.flat_range(window * n // num_slices, (window + 1) * n // num_slices)
