"""Of program: the schedule of a program, found by running it on symbols.

The tensor is cut at every box bound of the program. Each atom of a buffer has the number of a sum,
which is a set of value parts, and the round from which on it is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvdcomm.errors import ProgramError
from rvdcomm.exports.schedule import (
    Input,
    Message,
    Output,
    Parts,
    Round,
    Schedule,
    Sum,
    Tensor,
    Value,
)
from rvdcomm.layout import Box, View, merged
from rvdcomm.program import (
    DST,
    MAX_SYMBOLS,
    SRC,
    Collective,
    Copy,
    Program,
    Transition,
    Zero,
    is_src,
)

Ints = NDArray[np.int32]


def schedule_of(program: Program) -> Schedule:
    """The schedule of a program of all ranks.

    An ``all_reduce`` of the backend becomes what it costs at least: each rank of the group sums one
    chunk and sends it to all.

    Raises:
        ProgramError: the program is of some ranks only, or too large.
    """
    if program.members is not None:
        raise ProgramError("a program of some ranks does not say what the others send.")
    return _Run(program).schedule()


class _Run:
    """A run on symbols: for every piece of a buffer, the sums and the rounds of its atoms."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.has_index = len(program.transitions) > 1
        self.index = self._numbered_bounds()
        self.at = [sorted(bounds) for bounds in self.index]
        self.numbers: dict[Parts, int] = {}
        self.parts: list[Parts] = []
        self.cells: dict[tuple[str, int, int], tuple[Ints, Ints]] = {}
        self.clock: dict[int, int] = defaultdict(int)
        self.sums: dict[int, list[Sum]] = defaultdict(list)
        self.messages: dict[int, list[Message]] = defaultdict(list)

    def _numbered_bounds(self) -> list[dict[int, int]]:
        """The number of each bound of a box, for every dim."""
        ends: list[set[int]] = [set() for _ in range(self.program.num_dims)]
        boxes = [piece for buffer in self.program.buffers for piece in buffer.pieces]
        for one in self.program.instructions:
            entries = (
                [e for m in one.messages for e in m.entries]
                if isinstance(one, Collective)
                else one.entries
            )
            boxes += [e.box for e in entries]
        # What the backend sums is sent in chunks.
        for one in self.program.collectives:
            if one.kind == "all_reduce":
                whole = (e.box for e in one.messages[0].entries)
                boxes += [chunk for box in whole for _, chunk in _chunks(box, one.ranks)]
        for box in boxes:
            for cut, low, high in zip(ends, box.lo, box.hi, strict=True):
                cut |= {low, high}
        index = [{bound: i for i, bound in enumerate(sorted(cut))} for cut in ends]
        num_atoms = sum(
            Box(*self._atom_bounds(index, piece)).num_elements
            for buffer in self.program.buffers
            for piece in buffer.pieces
        )
        if num_atoms > MAX_SYMBOLS // 4:
            raise ProgramError(
                f"too large for a schedule: {num_atoms} pieces of buffers, at most "
                f"{MAX_SYMBOLS // 4}."
            )
        return index

    @staticmethod
    def _atom_bounds(index: list[dict[int, int]], box: Box) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(numbers[bound] for numbers, bound in zip(index, ends, strict=True))
            for ends in (box.lo, box.hi)
        )

    def _number(self, parts: Parts) -> int:
        if parts not in self.numbers:
            self.numbers[parts] = len(self.parts)
            self.parts.append(parts)
        return self.numbers[parts]

    # --- values ---------------------------------------------------------------------------------

    def _view(self, name: str, rank: int, piece: int, box: Box) -> tuple[Ints, Ints]:
        """The sums and the rounds of the atoms of a box."""
        outer = self.program.buffer[name, rank].pieces[piece]
        known = self.cells.get((name, rank, piece))
        shape = Box(*self._atom_bounds(self.index, outer)).shape
        if known is None:
            known = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
            self.cells[name, rank, piece] = known
        lo, hi = self._atom_bounds(self.index, box)
        base, _ = self._atom_bounds(self.index, outer)
        index: tuple[Any, ...] = (..., *Box(lo, hi).slices_within(Box(base, hi)))
        return known[0][index], known[1][index]

    def _values(self, box: Box, numbers: Ints) -> Iterator[tuple[Value, NDArray[np.bool_]]]:
        """The values of a box, one for each sum in it, in few boxes; with the atoms of each."""
        lo, _ = self._atom_bounds(self.index, box)
        for number in np.unique(numbers[numbers >= 0]):
            mask = numbers == number
            if mask.all():
                yield self._value(box, self.parts[number]), mask
                continue
            atoms = [Box(tuple(at), tuple(i + 1 for i in at)) for at in np.argwhere(mask).tolist()]
            for each in merged(atoms):
                one = np.zeros_like(mask)
                one[each.slices_within(Box((0,) * len(lo), each.hi))] = True
                ends = (
                    tuple(at[low + i] for at, low, i in zip(self.at, lo, side, strict=True))
                    for side in (each.lo, each.hi)
                )
                yield self._value(Box(*ends), self.parts[number]), one

    def _value(self, box: Box, parts: Parts) -> Value:
        """A value of the box of one tensor, without the dim of its number and those of others."""
        if not self.has_index:
            return Value(0, box, parts)
        index = box.lo[0]
        num_dims = self.program.transitions[index].num_dims
        return Value(index, Box(box.lo[1 : 1 + num_dims], box.hi[1 : 1 + num_dims]), parts)

    # --- instructions ---------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Run the program and gather what was sent and summed."""
        for rank in self.program.ranks:
            for name in filter(is_src, self.program.shard_names(rank)):
                part = self.program.transition(name).src.cell(rank).part
                numbers, _ = self._view(name, rank, 0, self.program.shard_box(name, rank))
                numbers[...] = self._number((part,))
        runners = {Copy: self._copy, Zero: self._zero, Collective: self._collective}
        for instruction in self.program.instructions:
            runners[type(instruction)](instruction)  # type: ignore[operator]
        count = 1 + max((*self.sums, *self.messages), default=-1)
        rounds = tuple(Round(tuple(self.sums[i]), tuple(self.messages[i])) for i in range(count))
        tensors = tuple(self._tensor(i, x) for i, x in enumerate(self.program.transitions))
        return Schedule(self.program.dtype, tensors, rounds)

    def _tensor(self, index: int, transition: Transition) -> Tensor:
        src, dst = transition.src, transition.dst
        suffix = str(index) if self.has_index else ""
        cells = [(rank, src.cell(rank)) for rank in src.ranks]
        inputs = tuple(
            Input(rank, cell.part, transition.box(SRC, rank)) for rank, cell in sorted(cells)
        )
        outputs = []
        for rank in sorted(dst.ranks):
            box = self.program.shard_box(f"{DST}{suffix}", rank)
            numbers, _ = self._view(f"{DST}{suffix}", rank, 0, box)
            values = tuple(value for value, _ in self._values(box, numbers))
            box = transition.box(DST, rank)
            outputs.append(Output(rank, dst.cell(rank).part, box, values))
        dims = (transition.view or View.whole(src.shape)).parts
        return Tensor(dims, transition.src_dtype, transition.dst_dtype, inputs, tuple(outputs))

    def _send(self, src: int, dst: int, box: Box, numbers: Ints, number: int) -> None:
        if src != dst:
            self.messages[number] += [
                Message(src, dst, value) for value, _ in self._values(box, numbers) if value.parts
            ]

    def _copy(self, copy: Copy) -> None:
        for e in copy.entries:
            if e.box.is_empty:
                continue
            sums, ready = self._view(copy.src, copy.src_rank, e.src_piece, e.box)
            if copy.is_remote:
                number = max(int(ready.max()), self.clock[copy.rank])
                self._send(copy.src_rank, copy.rank, e.box, sums, number)
                ready = np.full_like(ready, number + 1)
            mine, since = self._view(copy.dst, copy.rank, e.dst_piece, e.box)
            if copy.op == "copy":
                mine[...], since[...] = sums, ready
            else:
                self._add(copy.rank, e.box, (mine, since), (sums, ready))

    def _add(self, rank: int, box: Box, mine: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> None:
        """Add atoms to those of a box, in the round from which on both are there."""
        number = int(max(mine[1].max(), other[1].max()))
        before, added = mine[0].copy(), other[0].copy()
        for left, mask in self._values(box, before):
            for right, common in self._values(box, np.where(mask, added, -1)):
                parts = tuple(sorted({*left.parts, *right.parts}))
                mine[0][common] = self._number(parts)
                if left.parts and right.parts:
                    self.sums[number].append(
                        Sum(rank, right.tensor, right.box, left.parts, right.parts)
                    )
        mine[1][...] = number

    def _zero(self, zero: Zero) -> None:
        for e in zero.entries:
            sums, _ = self._view(zero.dst, zero.rank, e.dst_piece, e.box)
            sums[...] = self._number(())

    def _collective(self, call: Collective) -> None:
        sides = zip(call.ranks, call.src, call.dst, strict=True)
        names = {rank: (src, dst) for rank, src, dst in sides}
        if call.kind == "all_reduce":
            # Each rank's message names its own boxes, which are those of all others.
            for own in zip(*(m.entries for m in call.messages), strict=True):
                views = {
                    rank: self._view(names[rank][1], rank, e.dst_piece, e.box)
                    for rank, e in zip(call.ranks, own, strict=True)
                }
                self._all_reduce(call.ranks, own[0].box, views)
            return
        sent = [
            (m, e, self._view(names[m.src_rank][0], m.src_rank, e.src_piece, e.box))
            for m in call.messages
            for e in m.entries
            if not e.box.is_empty
        ]
        pairs = [(m.src_rank, m.dst_rank) for m, _, _ in sent if m.src_rank != m.dst_rank]
        busy = {rank for pair in pairs for rank in pair}
        number = max(
            (*(self.clock[rank] for rank in busy), *(int(r.max()) for _, _, (_, r) in sent)),
            default=0,
        )
        for m, e, (sums, ready) in sent:
            self._send(m.src_rank, m.dst_rank, e.box, sums, number)
            mine, since = self._view(names[m.dst_rank][1], m.dst_rank, e.dst_piece, e.box)
            mine[...] = sums
            since[...] = ready if m.src_rank == m.dst_rank else number + 1
        for rank in busy:
            self.clock[rank] = number + 1

    def _all_reduce(
        self, ranks: tuple[int, ...], box: Box, views: dict[int, tuple[Ints, Ints]]
    ) -> None:
        """Each rank sums its chunk in the order of ranks and sends it to all others."""
        if box.is_empty:
            return
        ready = (int(since.max()) for _, since in views.values())
        number = max(*(self.clock[rank] for rank in ranks), *ready)
        lo, _ = self._atom_bounds(self.index, box)
        for rank, chunk in _chunks(box, ranks):
            bounds = Box(*self._atom_bounds(self.index, chunk))
            index: tuple[Any, ...] = (..., *bounds.slices_within(Box(lo, bounds.hi)))
            total: tuple[Ints, Ints] | None = None
            for other in ranks:
                sums = views[other][0][index].copy()
                self._send(other, rank, chunk, sums, number)
                arrived = sums, np.full_like(sums, number + 1)
                if total is None:
                    total = arrived
                else:
                    self._add(rank, chunk, total, arrived)
            assert total is not None
            for other in ranks:
                self._send(rank, other, chunk, total[0], number + 1)
                views[other][0][index] = total[0]
                views[other][1][index] = number + 2
        for rank in ranks:
            self.clock[rank] = number + 2


def _chunks(box: Box, ranks: tuple[int, ...]) -> list[tuple[int, Box]]:
    """A chunk of the box for each rank, nearly equal along the longest dim; none is empty."""
    if not box.shape:
        return [(ranks[0], box)]
    d = max(range(len(box.shape)), key=lambda i: box.shape[i])
    size, k = box.shape[d], len(ranks)
    found = []
    for i, rank in enumerate(ranks):
        lo, hi = list(box.lo), list(box.hi)
        lo[d], hi[d] = box.lo[d] + i * size // k, box.lo[d] + (i + 1) * size // k
        found.append((rank, Box(tuple(lo), tuple(hi))))
    return [(rank, chunk) for rank, chunk in found if not chunk.is_empty]
