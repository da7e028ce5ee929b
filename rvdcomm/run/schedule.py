"""Schedule: what one rank of a program does in order, and what it waits for.

A program is one global order for all ranks. Ranks may run ahead of each other as long as the result
stays the same. An instruction may have to wait for two things before it uses memory: a collective
of its own rank, which must be finished, and instructions of other ranks of the domain (the
shared-memory domain), which must have written the data that it reads, or have read the data that it
overwrites. Every rank counts its *events*. To wait for an instruction of another rank is to wait
until that rank has counted the event that follows the instruction.

No schedule can deadlock: a rank waits only for something earlier in the global order, and counts
its own events before it waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rvdcomm.collector import paused_collector
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
class WaitSchedule:
    """The actions of one rank; ``totals`` are the events per call of every rank of its domain.

    Law (tests/run/test_schedule.py): at any speeds of the ranks, schedules give the result of the
    global order, and no rank waits forever.
    """

    actions: tuple[Action, ...]
    totals: dict[int, int]


@paused_collector()
def schedule(program: Program, rank: int) -> WaitSchedule:
    """The schedule of ``rank``."""
    group = next((group for group in program.peer_groups if rank in group), (rank,))
    return _Scheduler(program, group).schedules()[rank]


def schedules(program: Program) -> dict[int, WaitSchedule]:
    """The schedules of all ranks."""
    out: dict[int, WaitSchedule] = {}
    for rank in program.ranks:
        if rank not in out:
            group = next((group for group in program.peer_groups if rank in group), (rank,))
            out |= _Scheduler(program, group).schedules()
    return out


# --- who uses which memory ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Access:
    """Boxes of a buffer of one rank that an instruction reads or writes."""

    buffer: str
    is_write: bool
    boxes: tuple[tuple[int, Box], ...]


def _src_boxes(entries: Iterable[Entry]) -> tuple[tuple[int, Box], ...]:
    return tuple([(e.src_piece, e.box) for e in entries])


def _dst_boxes(entries: Iterable[Entry]) -> tuple[tuple[int, Box], ...]:
    return tuple([(e.dst_piece, e.box) for e in entries])


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


def _written(instruction: Instruction, rank: int) -> str | None:
    """The buffer of ``rank`` that ``instruction`` writes; None if there is none."""
    if isinstance(instruction, Collective):
        name = instruction.dst[instruction.ranks.index(rank)]
        return None if name == NO_BUFFER else name
    return instruction.dst if instruction.rank == rank else None


class _Held:
    """The boxes of one buffer that a collective in flight reads, and those that it writes."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[bool, int], list[Box]] = {}

    def add(self, access: _Access) -> None:
        """Record an access of the collective."""
        for piece, box in access.boxes:
            self._boxes.setdefault((access.is_write, piece), []).append(box)

    def conflicts(self, access: _Access) -> bool:
        """Whether the order of the collective and of another access to the buffer matters."""
        kinds = (True, False) if access.is_write else (True,)
        return any(
            box.overlaps(other)
            for piece, box in access.boxes
            for is_write in kinds
            for other in self._boxes.get((is_write, piece), ())
        )


class _Occupants:
    """Which staging buffer every byte of a rank's arena belongs to, as the program goes on.

    A buffer takes over its bytes from the buffers that had them before, which nobody uses any more.
    Invariant: the intervals ascend and are disjoint.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self._offsets = program.arena(rank).offsets
        self._size = {
            name: program.buffer[name, rank].num_elements * program.item_bytes
            for name in self._offsets
        }
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._names: list[str] = []

    def take(self, name: str) -> list[str]:
        """Give buffer ``name`` its bytes, when it is first written; returns those that lose some.

        An interval is lost once, so all calls together take time proportional to the buffers.
        """
        start = self._offsets[name]
        end = start + self._size.pop(name)
        if start == end:
            return []
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end, first)
        lost = self._names[first:last]
        kept = [(start, end, name)]
        if lost and self._starts[first] < start:
            kept.insert(0, (self._starts[first], start, lost[0]))
        if lost and self._ends[last - 1] > end:
            kept.append((end, self._ends[last - 1], lost[-1]))
        self._starts[first:last] = [start for start, _, _ in kept]
        self._ends[first:last] = [end for _, end, _ in kept]
        self._names[first:last] = [name for _, _, name in kept]
        return lost

    def is_new(self, name: str) -> bool:
        """Whether a staging buffer was not written yet."""
        return name in self._size


# --- what waits for what ------------------------------------------------------------------------

_ActionKey = tuple[int, int]
"""An action, as (rank, index in the actions of that rank)."""


class _Scheduler:
    """Makes the schedules of the ranks of one domain together, since they depend on each other.

    The time is proportional to the program: an instruction looks only at the buffers that it names,
    and a buffer, when it is first written, at those whose memory it takes over.
    """

    def __init__(self, program: Program, group: tuple[int, ...]) -> None:
        self.program, self.group = program, group
        self.actions: dict[int, list[Do | Start | Finish]] = {rank: [] for rank in group}
        # The actions of all ranks, in the global order.
        self.order: list[_ActionKey] = []
        # For every action, the actions of other ranks that must come first; and all of these.
        self.needs: dict[_ActionKey, set[_ActionKey]] = {}
        self._needed: dict[int, set[int]] = {rank: set() for rank in group}
        self._occupants = {rank: _Occupants(program, rank) for rank in group}
        # By rank: collectives in flight, in their order, and what they hold of every buffer.
        self._pending: dict[int, dict[int, Collective]] = {rank: {} for rank in group}
        self._held: dict[int, dict[str, dict[int, _Held]]] = {rank: {} for rank in group}
        self._last_write: dict[tuple[int, str], _ActionKey] = {}
        self._readers: dict[tuple[int, str], dict[int, _ActionKey]] = {}
        for instruction in program.instructions:
            self._place(instruction)
        for rank in group:
            for collective in self._pending[rank].values():
                self._add(rank, Finish(collective))

    def schedules(self) -> dict[int, WaitSchedule]:
        """The schedules of all ranks of the domain.

        A rank counts an event after an awaited action, just before it next blocks. It blocks in a
        transfer, or where it waits for a count that it has not seen yet.
        """
        events = {rank: _Events(self.group, self._awaited(rank)) for rank in self.group}
        first_write = {rank: self._first_arena_write(rank) for rank in self.group}
        for rank, i in self.order:
            waits = [(peer, events[peer].after(j)) for peer, j in self.needs.get((rank, i), ())]
            if i == first_write[rank]:
                waits += [(peer, 0) for peer in self.group if peer != rank]
            events[rank].add(self.actions[rank][i], waits)
        for each in events.values():
            each.advance()
        totals = {rank: each.total for rank, each in events.items()}
        return {rank: WaitSchedule(tuple(each.actions), totals) for rank, each in events.items()}

    # --- building -------------------------------------------------------------------------------

    def _place(self, instruction: Instruction) -> None:
        """Append an instruction to the actions of its ranks, after the collectives it waits for."""
        ranks = [rank for rank in instruction.ranks if rank in self.actions]
        actors = ranks if isinstance(instruction, Collective) else ranks[:1]
        lost = [self._taken(rank, instruction) for rank in actors]
        for i, rank in enumerate(ranks):
            if self._held[rank]:
                self._finish_conflicting(rank, instruction, lost[i] if i < len(lost) else ())
        for rank, names in zip(actors, lost, strict=True):
            if isinstance(instruction, Collective):
                self._act(rank, Start(instruction), instruction, names)
                self._hold(rank, instruction)
            else:
                self._act(rank, Do(instruction), instruction, names)

    def _taken(self, rank: int, instruction: Instruction) -> list[str]:
        """The buffers of ``rank`` whose memory the instruction is the first to use for another."""
        name, occupants = _written(instruction, rank), self._occupants[rank]
        return occupants.take(name) if name is not None and occupants.is_new(name) else []

    def _hold(self, rank: int, collective: Collective) -> None:
        self._pending[rank][id(collective)] = collective
        for access in _accesses(collective, rank):
            holders = self._held[rank].setdefault(access.buffer, {})
            holders.setdefault(id(collective), _Held()).add(access)

    def _finish_conflicting(self, rank: int, instruction: Instruction, lost: Sequence[str]) -> None:
        held = self._held[rank]
        found = {number for name in lost for number in held.get(name, ())}
        for access in _accesses(instruction, rank):
            for number, mine in held.get(access.buffer, {}).items():
                if number not in found and mine.conflicts(access):
                    found.add(number)
        # In the order of their starts, which is the same on all ranks of a group.
        for number in [number for number in self._pending[rank] if number in found]:
            self._finish(rank, number)

    def _finish(self, rank: int, number: int) -> None:
        collective = self._pending[rank].pop(number)
        point = self._add(rank, Finish(collective))
        for name in collective.buffers_of(rank) - {NO_BUFFER}:
            holders = self._held[rank][name]
            del holders[number]
            if not holders:
                del self._held[rank][name]
        written = _written(collective, rank)
        if written is not None:
            self._last_write[rank, written] = point

    def _act(
        self, rank: int, action: Do | Start, instruction: Instruction, lost: Sequence[str]
    ) -> None:
        needs: set[_ActionKey] = set()
        point = self._add(rank, action)
        if isinstance(instruction, Copy) and instruction.is_remote:
            source = instruction.src_rank, instruction.src
            if (written := self._last_write.get(source)) is not None:
                needs.add(written)
            self._readers.setdefault(source, {})[rank] = point
        name = _written(instruction, rank)
        if name is not None:
            # The last reads by other ranks of memory that the instruction changes.
            for other in (name, *lost):
                if (readers := self._readers.get((rank, other))) is not None:
                    needs.update(readers.values())
            self._last_write[rank, name] = point
        if needs:
            self.needs[point] = needs
            for peer, i in needs:
                self._needed[peer].add(i)

    def _add(self, rank: int, action: Do | Start | Finish) -> _ActionKey:
        point = rank, len(self.actions[rank])
        self.actions[rank].append(action)
        self.order.append(point)
        return point

    def _first_arena_write(self, rank: int) -> int | None:
        """Index of the first write to memory that other ranks may still read for earlier calls."""
        for i, action in enumerate(self.actions[rank]):
            if isinstance(action, Finish):
                continue
            what = action.instruction if isinstance(action, Do) else action.collective
            name = _written(what, rank)
            if name is not None and not is_shard(name):
                return i
        return None

    def _awaited(self, rank: int) -> frozenset[int]:
        """The actions of ``rank`` that other ranks wait for, in this call or in the next."""
        reads = [
            i
            for i, action in enumerate(self.actions[rank])
            if isinstance(action, Do)
            and isinstance(action.instruction, Copy)
            and action.instruction.is_remote
        ]
        # The last remote read is awaited too: the next call overwrites the memory that it reads.
        return frozenset(self._needed[rank].union(reads[-1:]))


class _Events:
    """The schedule of one rank in the making: its actions, and the events that it counts."""

    def __init__(self, group: Sequence[int], awaited: frozenset[int]) -> None:
        self.actions: list[Action] = []
        self.total = 0
        self._awaited = awaited
        self._is_due = False
        # By action, the events before it. By rank, the largest count that was waited for.
        self._before: list[int] = []
        self._known = dict.fromkeys(group, -1)

    def after(self, index: int) -> int:
        """The count that tells that an awaited action is done."""
        return self._before[index] + 1

    def add(self, action: Do | Start | Finish, waits: Iterable[tuple[int, int]]) -> None:
        """Append an action, which needs these counts of other ranks."""
        known = self._known
        new = {peer: count for peer, count in sorted(waits) if count > known[peer]}
        if new or not isinstance(action, Do):
            self.advance()
        self._is_due |= len(self._before) in self._awaited
        self._before.append(self.total)
        self.actions += [Await(peer, count) for peer, count in new.items()]
        self._known |= new
        self.actions.append(action)

    def advance(self) -> None:
        """Count an event, if an action since the last one is awaited."""
        if self._is_due:
            self.total += 1
            self.actions.append(Advance())
        self._is_due = False
