"""Verify: prove by symbolic execution over all ranks that a program does what its layouts say.

The tensor is cut at every box bound that occurs in the program. All elements of such an *atom* are
treated alike. So one counter per atom and value part is enough for an atom of any size: how often
the part was added (docs/program.md). A digest per atom records the order in which parts were added:
floating-point sums with equal digests have equal bits.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rvdcomm.errors import ProgramError
from rvdcomm.layout import Box, Ints
from rvdcomm.program.instructions import NO_BUFFER, Buffer, Collective, Copy, Entry, Zero
from rvdcomm.program.program import Program
from rvdcomm.program.shards import DST, is_shard, is_src, shard_name
from rvdcomm.program.wellformed import boxes_of, check_form

UNWRITTEN = -1
MANY = 1000
"""Counters saturate here, since one that overflowed could become 1 again."""
MAX_SYMBOLS = 1 << 27
"""The most counters in all buffers and boxes, of 2 bytes each: bounds memory and time."""


@dataclass(frozen=True)
class Proof:
    """The result of verifying a program that is right.

    Attributes:
        rounds_apart: pairs (first replica, other replica) of dst ranks that add the parts of src in
            different orders. Their floating-point elements may differ in the last bits. The
            elements of all other replicas are equal bit by bit.
    """

    rounds_apart: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Values:
    """The known values of every atom of a piece.

    ``counts`` [num_parts, *atoms] says how often every part is in an atom; UNWRITTEN at first.
    ``orders`` [1, *atoms] is a digest of an atom's sum, including its parentheses; NO_SUMMANDS if
    the sum is zero.
    """

    counts: NDArray[np.int16]
    orders: NDArray[np.uint64]

    def within(self, slices: tuple[slice, ...]) -> _Values:
        """A view of some atoms."""
        index = (slice(None), *slices)
        return _Values(self.counts[index], self.orders[index])

    def copy(self) -> _Values:
        return _Values(self.counts.copy(), self.orders.copy())

    def assign(self, other: _Values) -> None:
        self.counts[:] = other.counts
        self.orders[:] = other.orders

    def add(self, other: _Values) -> None:
        np.minimum(self.counts + other.counts, MANY, out=self.counts)
        # Symmetric: a + b has the bits of b + a.
        low, high = np.minimum(self.orders, other.orders), np.maximum(self.orders, other.orders)
        self.orders[:] = np.where(low == NO_SUMMANDS, high, _digest(_digest(high) ^ low))


NO_SUMMANDS = np.uint64(0)


def _digest(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of every value (the finalizer of splitmix64; Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def verify(program: Program) -> Proof:
    """Check every invariant of ``Program``, and that the program gives the right result.

    Proved: every element of every dst shard is written once, before it is read; over the value
    parts of dst each src part is in it exactly once; replicas hold equal sums; in every collective
    each rank occurs once, groups ascend, sizes agree and runs are contiguous. All ranks issue their
    collectives in one global order, with equal groups on all members, so no rank waits forever.

    Raises:
        ProgramError: the message names the instruction and the ranks.
    """
    check_form(program)
    return _Verifier(program).run()


@dataclass
class _Verifier:
    program: Program

    def __post_init__(self) -> None:
        self._known: dict[Box, Box] = {}
        boxes = list(boxes_of(self.program))
        bounds: list[list[set[int]]] = [
            [set() for _ in range(self.program.num_dims)] for _ in self.program.transitions
        ]
        for box in boxes:
            for cut, low, high in zip(bounds[self._tensor(box)], box.lo, box.hi, strict=True):
                cut |= {low, high}
        # For every tensor and dim, the number of each bound in ascending order.
        self.index = [
            [{bound: i for i, bound in enumerate(sorted(cut))} for cut in cuts] for cuts in bounds
        ]
        self.num_parts = max(transition.src.rvd.v for transition in self.program.transitions)
        num_symbols = self.num_parts * sum(self._atoms(box).num_elements for box in boxes)
        if num_symbols > MAX_SYMBOLS:
            raise ProgramError(
                f"too large to prove: {num_symbols} counts of parts in all boxes, at most "
                f"{MAX_SYMBOLS}."
            )
        self.values: dict[tuple[str, int, int], _Values] = {}
        for buffer in self.program.buffers:
            for i, piece in enumerate(buffer.pieces):
                atoms = self._atoms(piece).shape
                self.values[buffer.name, buffer.rank, i] = _Values(
                    np.full((self.num_parts, *atoms), UNWRITTEN, np.int16),
                    np.full((1, *atoms), NO_SUMMANDS),
                )

    def _tensor(self, box: Box) -> int:
        """The index of the tensor to which a box belongs."""
        return box.lo[0] if len(self.program.transitions) > 1 else 0

    def _atoms(self, box: Box) -> Box:
        """The box in units of atoms; most boxes are asked for many times."""
        found = self._known.get(box)
        if found is None:
            index = self.index[self._tensor(box)]
            lo, hi = (
                tuple(numbers[bound] for numbers, bound in zip(index, side, strict=True))
                for side in box
            )
            found = self._known[box] = Box(lo, hi)
        return found

    def run(self) -> Proof:
        for rank in self.program.ranks:
            for name in self.program.shard_names(rank):
                self._check_shard(name, rank)
                if is_src(name):
                    values = self.values[name, rank, 0]
                    part = self.program.transition(name).src.cell(rank).part
                    values.counts[:] = 0
                    values.counts[part] = 1
                    values.orders[:] = _digest(np.array([part + 1], np.uint64))
        runners = {Copy: self._copy, Zero: self._zero, Collective: self._collective}
        for i, instruction in enumerate(self.program.instructions):
            try:
                runners[type(instruction)](instruction)  # type: ignore[operator]
            except ProgramError as error:
                raise ProgramError(f"instruction {i}: {error}") from None
        indices = range(len(self.program.transitions))
        return Proof(tuple(sorted({pair for i in indices for pair in self._check_result(i)})))

    def _check_shard(self, name: str, rank: int) -> None:
        buffer = self.program.buffer.get((name, rank))
        if buffer is None or buffer.pieces != (self.program.shard_box(name, rank),):
            layout = self.program.transition(name).layout(name)
            raise ProgramError(f"buffer {name} of rank {rank} is not its shard of {layout}.")

    # --- instructions ---------------------------------------------------------------------------

    def _view(self, name: str, rank: int, piece: int, box: Box) -> _Values:
        buffer = self.program.buffer.get((name, rank))
        if buffer is None or not 0 <= piece < len(buffer.pieces):
            raise ProgramError(f"rank {rank} has no piece {piece} of buffer {name}.")
        outer = buffer.pieces[piece]
        if not outer.contains(box):
            raise ProgramError(
                f"rank {rank}: {box} is not inside piece {piece} of {name}, {outer}."
            )
        slices = self._atoms(box).slices_within(self._atoms(outer))
        return self.values[name, rank, piece].within(slices)

    def _read(self, name: str, rank: int, piece: int, box: Box) -> _Values:
        values = self._view(name, rank, piece, box)
        if (values.counts == UNWRITTEN).any():
            raise ProgramError(f"rank {rank} reads {box} of {name} before it is written.")
        return values

    def _writable(self, name: str, rank: int, piece: int, box: Box) -> _Values:
        if is_src(name):
            raise ProgramError(f"rank {rank} writes to {name}, which is the caller's.")
        return self._view(name, rank, piece, box)

    def _store(self, name: str, rank: int, piece: int, box: Box, values: _Values) -> None:
        view = self._unwritten(name, rank, piece, box)
        view.assign(values)

    def _unwritten(self, name: str, rank: int, piece: int, box: Box) -> _Values:
        view = self._writable(name, rank, piece, box)
        if (view.counts != UNWRITTEN).any():
            raise ProgramError(f"rank {rank} writes {box} of {name} twice.")
        return view

    def _copy(self, copy: Copy) -> None:
        if copy.op not in ("copy", "add"):
            raise ProgramError(f"unknown operation {copy.op!r}.")
        if copy.is_remote and is_shard(copy.src):
            raise ProgramError(
                f"rank {copy.rank} reads {copy.src} of rank {copy.src_rank}, which is private."
            )
        if copy.op == "add" and len({*map(self.program.dtype_of, (copy.src, copy.dst))}) > 1:
            raise ProgramError(f"rank {copy.rank} adds {copy.src} to {copy.dst} of another dtype.")
        for e in copy.entries:
            values = self._read(copy.src, copy.src_rank, e.src_piece, e.box)
            if copy.op == "copy":
                self._store(copy.dst, copy.rank, e.dst_piece, e.box, values)
                continue
            self._read(copy.dst, copy.rank, e.dst_piece, e.box)
            self._writable(copy.dst, copy.rank, e.dst_piece, e.box).add(values)

    def _zero(self, zero: Zero) -> None:
        for e in zero.entries:
            self._unwritten(zero.dst, zero.rank, e.dst_piece, e.box).counts[:] = 0

    def _collective(self, collective: Collective) -> None:
        ranks = collective.ranks
        if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(self.program.ranks):
            raise ProgramError(f"{collective.kind}: group {ranks} is not ascending ranks.")
        if len(collective.src) != len(ranks) or len(collective.dst) != len(ranks):
            raise ProgramError(
                f"{collective.kind}: group {ranks} needs one src and dst buffer each."
            )
        for rank in ranks:
            for name in collective.buffers_of(rank) - {NO_BUFFER}:
                if (name, rank) not in self.program.buffer:
                    raise ProgramError(f"rank {rank} has no buffer {name}.")
        for m in collective.messages:
            if not {m.src_rank, m.dst_rank} <= set(ranks):
                raise ProgramError(f"message {m.src_rank}->{m.dst_rank} leaves group {ranks}.")
        pairs = [(m.src_rank, m.dst_rank) for m in collective.messages]
        if pairs != sorted(pairs):
            raise ProgramError(f"{collective.kind}: messages are not in the order of ranks.")
        if collective.kind == "all_reduce":
            self._all_reduce(collective)
            return
        if collective.kind == "all_gather":
            self._check_gather(collective)
        elif collective.kind != "all_to_all":
            raise ProgramError(f"unknown collective {collective.kind!r}.")
        buffer_of = dict(zip(ranks, zip(collective.src, collective.dst, strict=True), strict=True))
        self._check_runs(collective)
        arrived = []
        for m in collective.messages:
            for e in m.entries:
                src = buffer_of[m.src_rank][0]
                values = self._read(src, m.src_rank, e.src_piece, e.box).copy()
                arrived.append((buffer_of[m.dst_rank][1], m.dst_rank, e.dst_piece, e.box, values))
        for item in arrived:
            self._store(*item)

    def _check_runs(self, collective: Collective) -> None:
        """Check that the data a rank sends, or receives, lie in one run in the order of ranks."""
        sent: dict[int, list[Entry]] = defaultdict(list)
        received: dict[int, list[Entry]] = defaultdict(list)
        for m in collective.messages:
            sent[m.src_rank] += m.entries
            received[m.dst_rank] += m.entries
        for rank, src, dst in zip(collective.ranks, collective.src, collective.dst, strict=True):
            once = sent[rank]
            if collective.kind == "all_gather":
                once = once[: len(once) // len(collective.ranks)]
            for name, entries, side in ((src, once, 0), (dst, received[rank], 1)):
                if entries and name == NO_BUFFER:
                    raise ProgramError(f"rank {rank} names no buffer for its {len(entries)} boxes.")
                if entries and self.program.dtype_of(name) != self.program.dtype:
                    raise ProgramError(f"rank {rank}: {name} is not of {self.program.dtype}.")
                if entries:
                    self._check_run(self.program.buffer[name, rank], entries, side)

    def _check_run(self, buffer: Buffer, entries: list[Entry], side: int) -> None:
        end: int | None = None
        for e in entries:
            piece = e.dst_piece if side else e.src_piece
            self._view(buffer.name, buffer.rank, piece, e.box)
            inner = e.box.flat_offset_within(buffer.pieces[piece])
            start = None if inner is None else buffer.offset(piece) + inner
            if start is None or (end is not None and start != end):
                raise ProgramError(
                    f"rank {buffer.rank}: {e.box} breaks the contiguous run in {buffer.name}."
                )
            end = start + e.box.num_elements

    def _check_gather(self, collective: Collective) -> None:
        """Check that every rank sends one list of boxes to all, and all lists have one size."""
        by_pair = collective.by_pair
        sizes = set()
        for a in collective.ranks:
            sent = [by_pair.get((a, b)) for b in collective.ranks]
            boxes = [None if m is None else [(e.src_piece, e.box) for e in m.entries] for m in sent]
            if boxes[0] is None or any(other != boxes[0] for other in boxes):
                raise ProgramError(f"all_gather: rank {a} sends different boxes to its group.")
            sizes.add(sum(box.num_elements for _, box in boxes[0]))
        if len(sizes) != 1:
            raise ProgramError(f"all_gather: group {collective.ranks} sends sizes {sorted(sizes)}.")

    def _all_reduce(self, collective: Collective) -> None:
        boxes = {tuple(e.box for e in m.entries) for m in collective.messages}
        pairs = [(m.src_rank, m.dst_rank) for m in collective.messages]
        if len(boxes) != 1 or pairs != [(rank, rank) for rank in collective.ranks]:
            raise ProgramError(f"all_reduce: group {collective.ranks} holds different boxes.")
        name_of = dict(zip(collective.ranks, collective.dst, strict=True))
        if collective.src != collective.dst:
            raise ProgramError("all_reduce works in place: src and dst must be one buffer.")
        for m in collective.messages:
            self._check_run(self.program.buffer[name_of[m.src_rank], m.src_rank], [*m.entries], 1)
        for i in range(len(collective.messages[0].entries)):
            views = []
            for m in collective.messages:
                e = m.entries[i]
                self._read(name_of[m.src_rank], m.src_rank, e.dst_piece, e.box)
                views.append(self._writable(name_of[m.src_rank], m.src_rank, e.dst_piece, e.box))
            counts = np.sum([view.counts for view in views], axis=0, dtype=np.int64)
            # The backend chooses the order of the sum. The order is equal on all ranks of the
            # group, and may be different for each place in the buffer.
            orders = np.full(views[0].orders.shape, i + 1, np.uint64)
            for view in views:
                orders = _digest(orders ^ view.orders)
            total = _Values(np.minimum(counts, MANY).astype(np.int16), orders)
            for view in views:
                view.assign(total)

    # --- result ---------------------------------------------------------------------------------

    def _check_result(self, index: int) -> set[tuple[int, int]]:
        """Check that replicas are equal, and that the parts of dst contain every src part once.

        Returns:
            Pairs of replicas that add parts in different orders.
        """
        src, dst = self.program.transitions[index].src, self.program.transitions[index].dst
        name = shard_name(DST, index, len(self.program.transitions))
        totals: dict[Box, Ints] = {}
        first: dict[tuple[int, Box], tuple[int, _Values]] = {}
        apart = set()
        for rank in dst.ranks:
            cell = dst.cell(rank)
            values = self._read(name, rank, 0, self.program.shard_box(name, rank))
            other, others = first.setdefault((cell.part, cell.box), (rank, values))
            if not np.array_equal(others.counts, values.counts):
                raise ProgramError(f"ranks {other} and {rank} are replicas but differ.")
            if not np.array_equal(others.orders, values.orders):
                apart.add((other, rank))
        for (_, box), (_, values) in first.items():
            counts = values.counts[: src.rvd.v].astype(np.int64)
            totals[box] = totals.get(box, 0) + counts
        for box, total in totals.items():
            if (total != 1).any() and not box.is_empty:
                atom = tuple(np.argwhere(total != 1)[0])
                raise ProgramError(
                    f"in {box} src part {atom[0]} is added {total[atom]} times instead of once."
                )
        return apart
