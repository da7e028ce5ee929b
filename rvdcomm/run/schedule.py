"""Schedule: what one rank of a program does in order, and what it waits for.

A program is one global order for all ranks. Ranks may run ahead of each other as long as the result
stays the same. An instruction may have to wait for two things before it uses memory: a collective
of its own rank, which must be finished, and instructions of other ranks of the island (the
shared-memory domain), which must have written the data that it reads, or have read the data that it
overwrites. Every rank counts its *events*. To wait for an instruction of another rank is to wait
until that rank has counted the event that follows the instruction.

No schedule can deadlock: a rank waits only for something earlier in the global order, and counts
its own events before it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.layout import Box
from rvdcomm.program import (
    NO_BUFFER,
    Collective,
    Copy,
    Entry,
    Instruction,
    Program,
    Zero,
    is_shard,
)


@dataclass(frozen=True, slots=True)
class Do:
    """Run a copy or a zero of this rank."""

    instruction: Copy | Zero


@dataclass(frozen=True, slots=True)
class Start:
    """Hand a collective to the backend."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait until a collective that was started is done."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until ``peer`` has counted ``count`` events of this call (0: all of earlier calls)."""

    peer: int
    count: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Count one event, which wakes the ranks that wait for it."""


Action = Do | Start | Finish | Await | Advance


@dataclass(frozen=True)
class Schedule:
    """The actions of one rank; ``totals`` are the events per call of every rank of its island.

    Law (tests/run/test_schedule.py): at any speeds of the ranks, schedules give the result of the
    global order, and no rank waits forever.
    """

    actions: tuple[Action, ...]
    totals: dict[int, int]


def schedule(program: Program, rank: int) -> Schedule:
    """The schedule of ``rank``."""
    group = next((group for group in program.peer_groups if rank in group), (rank,))
    return _Scheduler(program, group).schedule(rank)


def schedules(program: Program) -> dict[int, Schedule]:
    """The schedules of all ranks."""
    out: dict[int, Schedule] = {}
    for rank in program.ranks:
        if rank not in out:
            group = next((group for group in program.peer_groups if rank in group), (rank,))
            scheduler = _Scheduler(program, group)
            out |= {member: scheduler.schedule(member) for member in group}
    return out


# --- who uses which memory ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Access:
    """Boxes of a buffer of one rank that an instruction reads or writes."""

    buffer: str
    is_write: bool
    boxes: tuple[tuple[int, Box], ...]


def _src_boxes(entries: Iterable[Entry]) -> tuple[tuple[int, Box], ...]:
    return tuple((e.src_piece, e.box) for e in entries)


def _dst_boxes(entries: Iterable[Entry]) -> tuple[tuple[int, Box], ...]:
    return tuple((e.dst_piece, e.box) for e in entries)


def _accesses(instruction: Instruction, rank: int) -> Iterator[_Access]:
    """The accesses of ``instruction`` to the memory of ``rank``."""
    if isinstance(instruction, Collective):
        i = instruction.ranks.index(rank)
        sent = [e for m in instruction.messages if m.src_rank == rank for e in m.entries]
        received = [e for m in instruction.messages if m.dst_rank == rank for e in m.entries]
        if instruction.src[i] != NO_BUFFER:
            yield _Access(instruction.src[i], False, _src_boxes(sent))
        if instruction.dst[i] != NO_BUFFER:
            yield _Access(instruction.dst[i], True, _dst_boxes(received))
        return
    if isinstance(instruction, Copy) and instruction.src_rank == rank:
        yield _Access(instruction.src, False, _src_boxes(instruction.entries))
    if instruction.rank == rank:
        yield _Access(instruction.dst, True, _dst_boxes(instruction.entries))


@dataclass(frozen=True)
class _MemorySpans:
    """The byte ranges of the staging buffers of one rank."""

    program: Program
    rank: int

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        item = self.program.item_bytes
        return {
            name: (start, start + self.program.buffer[name, self.rank].num_elements * item)
            for name, start in self.program.arena(self.rank).offsets.items()
        }

    def overlap(self, a: str, b: str) -> bool:
        """Whether two buffers share bytes."""
        if a == b or is_shard(a) or is_shard(b):
            return a == b
        (a_start, a_end), (b_start, b_end) = self._spans[a], self._spans[b]
        return a_start < b_end and b_start < a_end

    def conflict(self, a: _Access, b: _Access) -> bool:
        """Whether the order of two accesses matters."""
        if not (a.is_write or b.is_write) or not self.overlap(a.buffer, b.buffer):
            return False
        if a.buffer != b.buffer:
            return True
        return any(i == j and box.overlaps(other) for i, box in a.boxes for j, other in b.boxes)


# --- what waits for what ------------------------------------------------------------------------

_ActionKey = tuple[int, int]
"""An action, as (rank, index in the actions of that rank)."""


class _Scheduler:
    """Makes the schedules of the ranks of one island together, since they depend on each other."""

    def __init__(self, program: Program, group: tuple[int, ...]) -> None:
        self.program, self.group = program, group
        self.memory = {rank: _MemorySpans(program, rank) for rank in group}
        self.actions: dict[int, list[Do | Start | Finish]] = {rank: [] for rank in group}
        # For every action, the actions of other ranks that must come first.
        self.needs: dict[_ActionKey, set[_ActionKey]] = {}
        self._pending: dict[int, list[Collective]] = {rank: [] for rank in group}
        self._last_write: dict[tuple[int, str], _ActionKey] = {}
        self._readers: dict[tuple[int, str], dict[int, _ActionKey]] = {}
        for instruction in program.instructions:
            self._place(instruction)
        for rank in group:
            for collective in self._pending[rank]:
                self._add(rank, Finish(collective))
        self._first_write = {rank: self._first_arena_write(rank) for rank in group}
        self.counts = {rank: self._count_events(rank) for rank in group}

    def schedule(self, rank: int) -> Schedule:
        """Actions of ``rank``, with the counts to wait for."""
        out: list[Action] = []
        known = dict.fromkeys(self.group, -1)
        counts = self.counts[rank]
        done = 0
        for i, action in enumerate(self.actions[rank]):
            if counts.before[i] > done:
                done = counts.before[i]
                out.append(Advance())
            for peer, count in self._waits(rank, i):
                if count > known[peer]:
                    known[peer] = count
                    out.append(Await(peer, count))
            out.append(action)
        if counts.total > done:
            out.append(Advance())
        return Schedule(tuple(out), {r: self.counts[r].total for r in self.group})

    def _waits(self, rank: int, index: int) -> list[tuple[int, int]]:
        needs = self.needs.get((rank, index), set())
        waits = {(peer, self.counts[peer].after(i)) for peer, i in needs}
        if index == self._first_write[rank]:
            waits |= {(peer, 0) for peer in self.group if peer != rank}
        return sorted(waits)

    # --- building -------------------------------------------------------------------------------

    def _place(self, instruction: Instruction) -> None:
        """Append an instruction to the actions of its ranks, after the collectives it waits for."""
        for rank in self.group:
            if rank in instruction.ranks:
                self._finish_conflicting(rank, instruction)
        if isinstance(instruction, Collective):
            for rank in self.group:
                if rank in instruction.ranks:
                    self._pending[rank].append(instruction)
                    self._act(rank, Start(instruction), instruction)
        elif instruction.rank in self.memory:
            self._act(instruction.rank, Do(instruction), instruction)

    def _finish_conflicting(self, rank: int, instruction: Instruction) -> None:
        memory, wanted = self.memory[rank], list(_accesses(instruction, rank))
        for collective in list(self._pending[rank]):
            held = list(_accesses(collective, rank))
            if any(memory.conflict(a, b) for a in held for b in wanted):
                self._pending[rank].remove(collective)
                point = self._add(rank, Finish(collective))
                for access in held:
                    if access.is_write:
                        self._last_write[rank, access.buffer] = point

    def _act(self, rank: int, action: Do | Start, instruction: Instruction) -> None:
        needs: set[_ActionKey] = set()
        if isinstance(instruction, Copy) and instruction.is_remote:
            written = self._last_write.get((instruction.src_rank, instruction.src))
            needs |= {written} if written is not None else set()
        for access in _accesses(instruction, rank):
            if access.is_write:
                needs |= self._readers_of(rank, access.buffer)
        point = self._add(rank, action)
        if needs:
            self.needs[point] = needs
        for access in _accesses(instruction, rank):
            if access.is_write:
                self._last_write[rank, access.buffer] = point
        if isinstance(instruction, Copy) and instruction.is_remote:
            key = instruction.src_rank, instruction.src
            self._readers.setdefault(key, {})[rank] = point

    def _readers_of(self, rank: int, buffer: str) -> set[_ActionKey]:
        """The last reads by other ranks of memory that writes to ``buffer`` of ``rank`` change."""
        memory = self.memory[rank]
        return {
            point
            for (owner, other), points in self._readers.items()
            if owner == rank and memory.overlap(buffer, other)
            for point in points.values()
        }

    def _add(self, rank: int, action: Do | Start | Finish) -> _ActionKey:
        self.actions[rank].append(action)
        return rank, len(self.actions[rank]) - 1

    def _first_arena_write(self, rank: int) -> int | None:
        """Index of the first write to memory that other ranks may still read for earlier calls."""
        for i, action in enumerate(self.actions[rank]):
            if isinstance(action, Finish):
                continue
            what = action.instruction if isinstance(action, Do) else action.collective
            if any(a.is_write and not is_shard(a.buffer) for a in _accesses(what, rank)):
                return i
        return None

    def _count_events(self, rank: int) -> _Events:
        """Place an event after every awaited action, just before this rank may next block."""
        awaited = {i for needs in self.needs.values() for r, i in needs if r == rank}
        reads = [
            i
            for i, action in enumerate(self.actions[rank])
            if isinstance(action, Do)
            and isinstance(action.instruction, Copy)
            and action.instruction.is_remote
        ]
        # The last remote read is awaited too: the next call overwrites the memory that it reads.
        awaited |= set(reads[-1:])
        before: list[int] = []
        total, is_due = 0, False
        for i, action in enumerate(self.actions[rank]):
            may_block = (
                not isinstance(action, Do)
                or (rank, i) in self.needs
                or i == self._first_write[rank]
            )
            if is_due and may_block:
                total, is_due = total + 1, False
            before.append(total)
            is_due |= i in awaited
        return _Events(tuple(before), total + is_due)


@dataclass(frozen=True, slots=True)
class _Events:
    """The events of one rank: it counts ``before[i]`` before action i, and ``total`` in all."""

    before: tuple[int, ...]
    total: int

    def after(self, index: int) -> int:
        """The count that tells that an awaited action is done."""
        return self.before[index] + 1
