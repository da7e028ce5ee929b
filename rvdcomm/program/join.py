"""Join: the programs of many tensors as one, in which those of a bucket travel together.

A *unit* is a slice of a tensor on its way, a *bucket* some units that go through their phases side
by side: in every phase the collectives of one kind and group become one collective, whose messages
hold the messages of all units. Buckets follow one another like slices of a tensor do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from rvdcomm.layout import Box
from rvdcomm.program.instructions import (
    NO_BUFFER,
    Buffer,
    Collective,
    Copy,
    Entry,
    Instruction,
    Message,
    Zero,
)
from rvdcomm.program.lower import Lanes
from rvdcomm.program.program import Program
from rvdcomm.program.shards import is_shard, lift, shard_name
from rvdcomm.program.slices import interleaved

Unit = tuple[int, int]
"""(tensor, lane)."""

Home = tuple[str, int]
"""(buffer, rank)."""

_Phase = tuple[list[Instruction], list[Collective], list[Collective]]
"""Copies, then the collectives that stay alone, then those that may be joined."""


def join(tensors: Sequence[Lanes], buckets: Sequence[Sequence[Unit]]) -> Program:
    """One program for all tensors.

    Args:
        tensors: what every tensor does; the dtypes of their staging are equal.
        buckets: every lane of every tensor once.

    Law (tests/test_join.py): it verifies, moves the bytes that the tensors' own programs move, and
    gives each tensor what its own program gives.
    """
    joint = _Joint(tensors)
    lanes = [
        [joint.phase(*parts, bucket + i) for i, parts in enumerate(joint.phases(units))]
        for bucket, units in enumerate(buckets)
    ]
    instructions = tuple(map(joint.settled, interleaved(lanes)))
    transitions = tuple(lanes.transition for lanes in tensors)
    return Program(transitions, tensors[0].dtype, tuple(joint.buffers()), instructions)


@dataclass
class _Joint:
    """The names, boxes and buffers of all tensors in one program."""

    tensors: Sequence[Lanes]

    def __post_init__(self) -> None:
        dims = [len(lanes.transition.src.shape) for lanes in self.tensors]
        self.num_dims = dims[0] if len(dims) == 1 else 1 + max(dims)
        self.made: list[Buffer] = []
        # Where the pieces of a buffer that was joined with others are now.
        self.moved: dict[Home, tuple[str, list[int]]] = {}

    def phases(self, units: Iterable[Unit]) -> Iterator[_Phase]:
        """What the units do, phase by phase."""
        lanes = [(t, self.tensors[t].lanes[lane]) for t, lane in units]
        for parts in zip_longest(*(phases for _, phases in lanes), fillvalue=()):
            copies: list[Instruction] = []
            alone: list[Collective] = []
            staged: list[Collective] = []
            for (t, _), part in zip(lanes, parts, strict=True):
                for instruction in part:
                    found = self._lifted(instruction, t)
                    if not isinstance(found, Collective):
                        copies.append(found)
                    else:
                        (staged if self.tensors[t].staged else alone).append(found)
            yield copies, alone, staged

    def phase(
        self,
        copies: list[Instruction],
        alone: list[Collective],
        staged: list[Collective],
        step: int,
    ) -> list[Instruction]:
        """A phase in its order, with joint collectives; all of them belong to ``step``."""
        alike: dict[tuple[str, tuple[int, ...]], list[Collective]] = {}
        for one in staged:
            alike.setdefault((one.kind, one.ranks), []).append(one)
        joined = (found[0] if len(found) == 1 else self._one(found) for found in alike.values())
        reads = (
            replace(one, step=step) if isinstance(one, Copy) and one.is_remote else one
            for one in copies
        )
        return [*reads, *(replace(one, step=step) for one in (*alone, *joined))]

    def settled(self, instruction: Instruction) -> Instruction:
        """The instruction with the buffers and pieces that there are in the end."""
        if isinstance(instruction, Collective):
            return instruction
        dst, dst_pieces = self._home(instruction.dst, instruction.rank)
        if isinstance(instruction, Zero):
            entries = tuple(
                Entry(e.box, e.src_piece, _at(dst_pieces, e.dst_piece)) for e in instruction.entries
            )
            return replace(instruction, dst=dst, entries=entries)
        src, src_pieces = self._home(instruction.src, instruction.src_rank)
        entries = tuple(
            Entry(e.box, _at(src_pieces, e.src_piece), _at(dst_pieces, e.dst_piece))
            for e in instruction.entries
        )
        return replace(instruction, src=src, dst=dst, entries=entries)

    def buffers(self) -> Iterator[Buffer]:
        """All buffers: those of every tensor that were not joined, and the joint ones."""
        for t, lanes in enumerate(self.tensors):
            for buffer in lanes.buffers:
                name = self._name(buffer.name, t)
                if (name, buffer.rank) not in self.moved:
                    pieces = tuple(self._box(box, t) for box in buffer.pieces)
                    yield Buffer(name, buffer.rank, pieces)
        yield from self.made

    # --- names and boxes ------------------------------------------------------------------------

    def _name(self, name: str, tensor: int) -> str:
        if is_shard(name):
            return shard_name(name, tensor, len(self.tensors))
        return name if name == NO_BUFFER else f"{name}.{tensor}"

    def _box(self, box: Box, tensor: int) -> Box:
        return box if len(self.tensors) == 1 else lift(box, tensor, self.num_dims)

    def _entries(self, entries: Iterable[Entry], tensor: int) -> tuple[Entry, ...]:
        return tuple(Entry(self._box(e.box, tensor), e.src_piece, e.dst_piece) for e in entries)

    def _lifted(self, instruction: Instruction, tensor: int) -> Instruction:
        if isinstance(instruction, Copy | Zero):
            dst = self._name(instruction.dst, tensor)
            entries = self._entries(instruction.entries, tensor)
            if isinstance(instruction, Zero):
                return replace(instruction, dst=dst, entries=entries)
            src = self._name(instruction.src, tensor)
            return replace(instruction, src=src, dst=dst, entries=entries)
        return replace(
            instruction,
            src=tuple(self._name(name, tensor) for name in instruction.src),
            dst=tuple(self._name(name, tensor) for name in instruction.dst),
            messages=tuple(
                replace(m, entries=self._entries(m.entries, tensor)) for m in instruction.messages
            ),
        )

    def _home(self, name: str, rank: int) -> tuple[str, list[int] | None]:
        return self.moved.get((name, rank), (name, None))

    # --- joint collectives ----------------------------------------------------------------------

    def _one(self, staged: list[Collective]) -> Collective:
        """Collectives of one kind and group, each on staging of its own, as one."""
        first = staged[0]
        name = f"all{len(self.made)}"
        if first.kind == "all_reduce":
            src = dst = self._memory(staged, f"x.{name}", is_dst=True)
        else:
            src = self._memory(staged, f"s.{name}", is_dst=False)
            dst = self._memory(staged, f"r.{name}", is_dst=True)
        pairs = sorted({pair for one in staged for pair in one.by_pair})
        messages = tuple(Message(*pair, tuple(self._along(staged, pair))) for pair in pairs)
        return replace(first, src=src, dst=dst, messages=messages)

    def _memory(self, staged: list[Collective], name: str, is_dst: bool) -> tuple[str, ...]:
        """One buffer a rank for what all of them send, or receive, in the order of the messages."""
        names = []
        for i, rank in enumerate(staged[0].ranks):
            pieces: list[Box] = []
            for peer in staged[0].ranks:
                pair = (peer, rank) if is_dst else (rank, peer)
                for one in staged:
                    home = (one.dst if is_dst else one.src)[i], rank
                    for e in one.by_pair[pair].entries if pair in one.by_pair else ():
                        self._move(home, e, is_dst, name, pieces)
            names.append(name if pieces else NO_BUFFER)
            if pieces:
                self.made.append(Buffer(name, rank, tuple(pieces)))
        return tuple(names)

    def _move(self, home: Home, entry: Entry, is_dst: bool, name: str, pieces: list[Box]) -> None:
        """Give the entry's piece its place, unless a gather sends it to somebody else too."""
        _, found = self.moved.setdefault(home, (name, []))
        piece = entry.dst_piece if is_dst else entry.src_piece
        found += [-1] * (piece + 1 - len(found))
        if found[piece] < 0:
            found[piece] = len(pieces)
            pieces.append(entry.box)

    def _along(self, staged: list[Collective], pair: tuple[int, int]) -> Iterator[Entry]:
        """What all of them send along a pair of ranks, at its new places."""
        ranks = staged[0].ranks
        src, dst = ranks.index(pair[0]), ranks.index(pair[1])
        for one in staged:
            _, src_pieces = self._home(one.src[src], pair[0])
            _, dst_pieces = self._home(one.dst[dst], pair[1])
            for e in one.by_pair[pair].entries if pair in one.by_pair else ():
                yield Entry(e.box, _at(src_pieces, e.src_piece), _at(dst_pieces, e.dst_piece))


def _at(pieces: list[int] | None, piece: int) -> int:
    return piece if pieces is None else pieces[piece]
