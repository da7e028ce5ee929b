"""Join: one program for many tensors, in which the tensors of a bucket share collectives.

A *unit* is one slice of one tensor. A *bucket* is a set of units that go through their phases side
by side: in every phase, the collectives of one kind and group become one collective, whose messages
contain the messages of all units. Buckets are pipelined like the slices of one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from rvdcomm.layout import Box
from rvdcomm.program.instructions import (
    NO_BUFFER,
    UNKNOWN_BUFFER,
    Buffer,
    BufferKey,
    Collective,
    Copy,
    Entry,
    Instruction,
    Message,
    Zero,
)
from rvdcomm.program.interleave import Lanes, interleaved
from rvdcomm.program.program import Program
from rvdcomm.program.shards import Transition, is_shard, lift, shard_name, wire_dtype

Unit = tuple[int, int]
"""(tensor, lane)."""


def join(
    transitions: Sequence[Transition],
    tensors: Mapping[int, Lanes],
    buckets: Sequence[Sequence[Unit]],
    ranks: tuple[int, ...] | None = None,
) -> Program:
    """One program for all tensors, of all ranks or of some.

    Args:
        transitions: the transitions of all tensors; all tensors are staged in one dtype.
        tensors: the instructions of every tensor that some of ``ranks`` take part in.
        buckets: the units of every bucket; every lane of every tensor is in one bucket.
        ranks: the ranks whose instructions ``tensors`` has; None for all ranks.

    Laws (tests/plans/test_bundle.py): the program verifies, moves as many bytes as the tensors' own
    programs, and gives each tensor the result of its own program. The program of some ranks is the
    part of the program of all ranks that concerns these ranks.
    """
    joint = _Joint(transitions, tensors)
    lanes = [[*joint.phases(units, bucket)] for bucket, units in enumerate(buckets)]
    instructions = tuple(map(joint.settled, interleaved(lanes)))
    buffers = tuple(joint.buffers())
    return Program(tuple(transitions), wire_dtype(transitions[0]), buffers, instructions, ranks)


class _Joint:
    """The names, boxes and buffers of all tensors in one program."""

    def __init__(self, transitions: Sequence[Transition], tensors: Mapping[int, Lanes]) -> None:
        self.tensors = tensors
        self.num_tensors = len(transitions)
        dims = [len(transition.src.shape) for transition in transitions]
        self.num_dims = dims[0] if len(dims) == 1 else 1 + max(dims)
        self.made: list[Buffer] = []
        # Number of joint collectives so far, by rank. It is part of the names of joint buffers.
        self.num_joined: Counter[int] = Counter()
        # For a buffer that was joined with others: the joint buffer, and its pieces there.
        self.moved: dict[BufferKey, tuple[str, list[int]]] = {}

    def phases(self, units: Iterable[Unit], bucket: int) -> Iterator[list[Instruction]]:
        """The instructions of the units by phase; the steps of phases count from ``bucket``.

        A phase has first the copies, then the collectives that are not joined, then the joined
        collectives.
        """
        lanes = [(t, self.tensors[t].lanes[lane]) for t, lane in units if t in self.tensors]
        every_phase = zip_longest(*(phases for _, phases in lanes), fillvalue=())
        for step, parts in enumerate(every_phase, bucket):
            copies: list[Instruction] = []
            alone: list[Collective] = []
            alike: dict[tuple[str, tuple[int, ...]], list[Collective]] = {}
            for (t, _), part in zip(lanes, parts, strict=True):
                for instruction in part:
                    found = self._lifted(instruction, t, step)
                    if not isinstance(found, Collective):
                        copies.append(found)
                    elif self.tensors[t].staged:
                        alike.setdefault((found.kind, found.ranks), []).append(found)
                    else:
                        alone.append(found)
            joined = (each[0] if len(each) == 1 else self._one(each) for each in alike.values())
            yield [*copies, *alone, *joined]

    def settled(self, instruction: Instruction) -> Instruction:
        """The instruction with joint buffers in place of the buffers that were joined."""
        if isinstance(instruction, Collective):
            return instruction
        dst, dst_pieces = self._home(instruction.dst, instruction.rank)
        if isinstance(instruction, Zero):
            entries = tuple(
                Entry(e.box, e.src_piece, _at(dst_pieces, e.dst_piece)) for e in instruction.entries
            )
            return Zero(instruction.rank, dst, entries)
        src, src_pieces = self._home(instruction.src, instruction.src_rank)
        if src_pieces is dst_pieces is None:
            return instruction
        entries = tuple(
            Entry(e.box, _at(src_pieces, e.src_piece), _at(dst_pieces, e.dst_piece))
            for e in instruction.entries
        )
        return replace(instruction, src=src, dst=dst, entries=entries)

    def buffers(self) -> Iterator[Buffer]:
        """All buffers: the buffers of every tensor that were not joined, and the joint buffers."""
        for t, lanes in self.tensors.items():
            for buffer in lanes.buffers:
                name = self._name(buffer.name, t)
                if (name, buffer.rank) not in self.moved:
                    pieces = tuple(self._box(box, t) for box in buffer.pieces)
                    yield Buffer(name, buffer.rank, pieces)
        yield from self.made

    # --- names and boxes ------------------------------------------------------------------------

    def _name(self, name: str, tensor: int) -> str:
        if is_shard(name):
            return shard_name(name, tensor, self.num_tensors)
        return name if name in (NO_BUFFER, UNKNOWN_BUFFER) else f"{name}.{tensor}"

    def _box(self, box: Box, tensor: int) -> Box:
        return box if self.num_tensors == 1 else lift(box, tensor, self.num_dims)

    def _entries(self, entries: Iterable[Entry], tensor: int) -> tuple[Entry, ...]:
        if self.num_tensors == 1:
            return tuple(entries)
        dims = self.num_dims
        return tuple([Entry(lift(e.box, tensor, dims), e.src_piece, e.dst_piece) for e in entries])

    def _lifted(self, one: Instruction, tensor: int, step: int) -> Instruction:
        """A tensor's instruction, with the names, boxes and step of the joint program."""
        if isinstance(one, Copy | Zero):
            dst = self._name(one.dst, tensor)
            entries = self._entries(one.entries, tensor)
            if isinstance(one, Zero):
                return Zero(one.rank, dst, entries)
            src = self._name(one.src, tensor)
            step = step if one.is_remote else one.step
            return Copy(one.op, one.rank, src, dst, entries, one.src_rank, step)
        return Collective(
            one.kind,
            step,
            one.ranks,
            tuple([self._name(name, tensor) for name in one.src]),
            tuple([self._name(name, tensor) for name in one.dst]),
            tuple(
                Message(m.src_rank, m.dst_rank, self._entries(m.entries, tensor))
                for m in one.messages
            ),
        )

    def _home(self, name: str, rank: int) -> tuple[str, list[int] | None]:
        return self.moved.get((name, rank), (name, None))

    # --- joint collectives ----------------------------------------------------------------------

    def _one(self, staged: list[Collective]) -> Collective:
        """Join collectives of one kind and group, each with staging of its own, into one."""
        first = staged[0]
        if first.kind == "all_reduce":
            src = dst = self._memory(staged, "x", is_dst=True)
        else:
            src = self._memory(staged, "s", is_dst=False)
            dst = self._memory(staged, "r", is_dst=True)
        self.num_joined.update(first.ranks)
        pairs = sorted({pair for one in staged for pair in one.by_pair})
        messages = tuple(Message(*pair, tuple(self._along(staged, pair))) for pair in pairs)
        return replace(first, src=src, dst=dst, messages=messages)

    def _memory(self, staged: list[Collective], kind: str, is_dst: bool) -> tuple[str, ...]:
        """Names of the ranks' joint buffers to send or receive; pieces are in message order."""
        names = []
        for i, rank in enumerate(staged[0].ranks):
            homes = [(one.dst if is_dst else one.src)[i] for one in staged]
            if UNKNOWN_BUFFER in homes:
                names.append(UNKNOWN_BUFFER)
                continue
            name = f"{kind}.all{self.num_joined[rank]}"
            pieces: list[Box] = []
            for peer in staged[0].ranks:
                pair = (peer, rank) if is_dst else (rank, peer)
                for one, home in zip(staged, homes, strict=True):
                    for e in one.by_pair[pair].entries if pair in one.by_pair else ():
                        self._move((home, rank), e, is_dst, name, pieces)
            names.append(name if pieces else NO_BUFFER)
            if pieces:
                self.made.append(Buffer(name, rank, tuple(pieces)))
        return tuple(names)

    def _move(
        self, home: BufferKey, entry: Entry, is_dst: bool, name: str, pieces: list[Box]
    ) -> None:
        """Append the entry's piece to ``pieces``, once: a gather sends it to several ranks."""
        _, found = self.moved.setdefault(home, (name, []))
        piece = entry.dst_piece if is_dst else entry.src_piece
        found += [-1] * (piece + 1 - len(found))
        if found[piece] < 0:
            found[piece] = len(pieces)
            pieces.append(entry.box)

    def _along(self, staged: list[Collective], pair: tuple[int, int]) -> Iterator[Entry]:
        """The entries of all messages of a pair of ranks, in the joint buffers."""
        ranks = staged[0].ranks
        src, dst = ranks.index(pair[0]), ranks.index(pair[1])
        for one in staged:
            _, src_pieces = self._home(one.src[src], pair[0])
            _, dst_pieces = self._home(one.dst[dst], pair[1])
            for e in one.by_pair[pair].entries if pair in one.by_pair else ():
                yield Entry(e.box, _at(src_pieces, e.src_piece), _at(dst_pieces, e.dst_piece))


def _at(pieces: list[int] | None, piece: int) -> int:
    return piece if pieces is None else pieces[piece]
