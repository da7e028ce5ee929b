"""Stage: the work of a rank between two calls of the backend, compiled for the native core.

Copies, sums and zeros become ops of copy programs. A stage first waits for all ranks that its next
copies need, so that value parts of different ranks are summed in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from operator import mul, sub
from typing import Any

from rvdcomm.layout import Box
from rvdcomm.native import core
from rvdcomm.program import SRC, Copy, Program, is_shard
from rvdcomm.run.in_place import Copies
from rvdcomm.run.schedule import Action, Advance, Await, Do

COPY, AWAIT, ADVANCE = range(3)
"""Kinds of actions (csrc/include/rvdcomm/stage.h)."""

Strides = tuple[int, ...]
ShardStrides = tuple[Strides | None, ...]
"""Strides of every shard of the rank, in elements; None for a contiguous shard."""
StridedRun = tuple[int, str, int, Strides]
"""(buffer, dtype, element offset, element strides)."""


def native_stage(
    program: Program,
    rank: int,
    domain: Sequence[int],
    actions: Sequence[Action],
    strides: ShardStrides | None = None,
    copies: Copies = frozenset(),
) -> Any:
    """Compile ``actions``, none of them a transfer, into a stage of the native core on the CPU.

    The stage has these buffers, in this order: the rank's shards (``program.shard_names(rank)``);
    if sources are read instead of ``copies``, the source of every rank of ``domain``; the arena of
    every rank of ``domain``, this rank included. Without ``strides`` all shards are contiguous.
    """
    strides = strides or (None,) * len(program.shard_names(rank))
    steps = list(_steps(_Memory(program, rank, domain, strides, copies), actions))
    programs = [what for kind, what, _ in steps if kind == COPY]
    numbers = iter(range(len(programs)))
    return core.Stage(
        programs,
        [(kind, next(numbers) if kind == COPY else what, count) for kind, what, count in steps],
        len(strides) + (len(domain) if copies else 0),
    )


class CudaStage:
    """A stage on a GPU: one kernel launch per batch of copies, on the caller's stream."""

    def __init__(
        self,
        program: Program,
        rank: int,
        domain: Sequence[int],
        actions: Sequence[Action],
        strides: ShardStrides,
    ) -> None:
        memory = _Memory(program, rank, domain, strides, frozenset())
        self._steps = list(_steps(memory, actions))

    def run(self, addresses: list[int], stream: Any, staging: Any) -> None:
        """Queue the work on ``stream``; ``staging`` waits for peers and signals to them."""
        for kind, what, count in self._steps:
            if kind == COPY:
                what.run_cuda(addresses, stream.cuda_stream)
            elif kind == AWAIT:
                staging.wait(what, count, stream)
            else:
                staging.advance(stream)


def _steps(memory: _Memory, actions: Sequence[Action]) -> Iterator[tuple[int, Any, int]]:
    """Steps of a stage, as (kind, copy program or index of a peer, count to wait for)."""
    for waits, copies, num_events in _rounds(actions):
        for wait in waits:
            yield AWAIT, memory.domain.index(wait.peer), wait.count
        if copies:
            batch = _CopyOps(memory)
            for do in copies:
                batch.add(do)
            # Other ranks wait for staged data, so copies to the arena must not bypass the caches.
            arena = memory.arena_of(memory.rank)
            yield COPY, core.CopyProgram(batch.ops, read_soon=[arena]), 0
        for _ in range(num_events):
            yield ADVANCE, 0, 0


def _rounds(actions: Sequence[Action]) -> list[tuple[list[Await], list[Do], int]]:
    """Split actions at every event, into (waits, copies, number of events that follow).

    No rank waits for a copy before the event that follows it, so all waits may come first.
    """
    found: list[tuple[list[Await], list[Do], int]] = []
    waits: list[Await] = []
    copies: list[Do] = []
    for action in actions:
        if isinstance(action, Await):
            waits.append(action)
        elif isinstance(action, Do):
            copies.append(action)
        elif isinstance(action, Advance):
            found.append((waits, copies, 1))
            waits, copies = [], []
    return [*found, (waits, copies, 0)]


@dataclass(frozen=True)
class _Memory:
    """Maps the buffers of a program to the numbered buffers of a stage, for one rank."""

    program: Program
    rank: int
    domain: Sequence[int]
    strides: ShardStrides
    copies: Copies

    @cached_property
    def shards(self) -> dict[str, int]:
        """The buffer numbers of the rank's shards, by name."""
        return {name: i for i, name in enumerate(self.program.shard_names(self.rank))}

    def source_of(self, owner: int) -> int:
        """The buffer number of the source of ``owner``, a rank of the domain."""
        if owner == self.rank:
            return self.shards[SRC]
        return len(self.strides) + self.domain.index(owner)

    def arena_of(self, owner: int) -> int:
        """The buffer number of the arena of ``owner``, a rank of the domain."""
        num_sources = len(self.domain) if self.copies else 0
        return len(self.strides) + num_sources + self.domain.index(owner)

    def side(self, owner: int, name: str, piece: int, box: Box) -> StridedRun:
        """The run of a box of a piece of a buffer of ``owner``."""
        if (owner, name) in self.copies:
            return self._shard(owner, SRC, self.source_of(owner), 0, box)
        if is_shard(name):
            return self._shard(owner, name, self.shards[name], piece, box)
        program = self.program
        start, strides = self._inside(owner, name, piece, box, None)
        start += program.arena(owner).offsets[name] // program.item_bytes
        return self.arena_of(owner), program.dtype, start, strides

    def _shard(self, owner: int, name: str, number: int, piece: int, box: Box) -> StridedRun:
        given = self.strides[number] if owner == self.rank else None
        strides = self._dims_of(name, given)
        start, strides = self._inside(owner, name, piece, box, strides)
        return number, self.program.dtype_of(name), start, strides

    def _inside(
        self, owner: int, name: str, piece: int, box: Box, strides: Strides | None
    ) -> tuple[int, Strides]:
        """Offset and strides of a box in a buffer, in elements; without ``strides``, contiguous."""
        buffer = self.program.buffer[name, owner]
        outer = buffer.pieces[piece]
        strides = strides or _contiguous(outer.shape)
        start = buffer.offset(piece)
        if box.lo != outer.lo:
            start += sum(map(mul, map(sub, box.lo, outer.lo), strides))
        return start, strides

    def _dims_of(self, name: str, strides: Strides | None) -> Strides | None:
        """The strides of a tensor, converted to the dims of the program."""
        if strides is None:
            return None
        transition = self.program.transition(name)
        if transition.view:
            strides = transition.view.strides(strides, transition.layout(name).cell(self.rank).box)
        if len(self.program.transitions) == 1:
            return strides
        return (0, *strides, *(0,) * (self.program.num_dims - 1 - len(strides)))


# Tensors of few shapes, and programs of many tensors: every entry of an instruction asks for it.
@lru_cache(maxsize=1 << 10)
def _contiguous(shape: tuple[int, ...]) -> Strides:
    """The strides of a row-major box."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


@dataclass
class _CopyOps:
    """Ops of one copy program."""

    memory: _Memory
    ops: list[tuple[tuple[int, ...], StridedRun, list[StridedRun]]] = field(default_factory=list)
    # For every buffer that this batch writes, and every piece: box and index of each op, in order.
    written: dict[str, dict[int, list[tuple[Box, int]]]] = field(default_factory=dict)
    # For every own buffer that this batch reads: the index of the last op that reads it.
    last_read: dict[str, int] = field(default_factory=dict)

    def add(self, do: Do) -> None:
        """Append an instruction's boxes."""
        instruction, side = do.instruction, self.memory.side
        for e in instruction.entries:
            dst = side(self.memory.rank, instruction.dst, e.dst_piece, e.box)
            target = instruction.dst, e.dst_piece, e.box
            if not isinstance(instruction, Copy):
                self._append(target, (e.box.shape, dst, []))
                continue
            src = side(instruction.src_rank, instruction.src, e.src_piece, e.box)
            if not instruction.is_remote:
                self.last_read[instruction.src] = len(self.ops)
            if instruction.op == "copy":
                self._append(target, (e.box.shape, dst, [src]))
            elif (summed := self._op_to_join(target, instruction)) is not None:
                self.ops[summed][2].append(src)
            else:
                self._append(target, (e.box.shape, dst, [dst, src]))

    def _append(self, target: tuple[str, int, Box], op: Any) -> None:
        name, piece, box = target
        pieces = self.written.setdefault(name, {})
        pieces.setdefault(piece, []).append((box, len(self.ops)))
        self.ops.append(op)

    def _op_to_join(self, target: tuple[str, int, Box], instruction: Copy) -> int | None:
        """The op to which this sum can add its source: the last one that writes to the box.

        None if that op writes another box or only zeros, if this batch writes the source, or if
        an op has read the destination since.
        """
        name, piece, box = target
        if not instruction.is_remote and instruction.src in self.written:
            return None
        for other, index in reversed(self.written.get(name, {}).get(piece, [])):
            if other.overlaps(box):
                is_same = other == box and bool(self.ops[index][2])
                return index if is_same and self.last_read.get(name, -1) <= index else None
        return None
