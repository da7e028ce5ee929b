"""Program: a plan for machines: buffers, copies and collectives in one order for all ranks.

Invariants (``verify.py`` checks them all): a buffer is the concatenation of its pieces, each a
row-major box; the data that a rank sends in one collective are one contiguous run of one buffer, in
the order of the group's ranks, and so are the data that it receives; a collective's group is
ascending, which is the order of every backend; a copy from another rank's memory reads a staging
buffer, never a shard, which is private to its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.layout import ITEM_BYTES, Box, Layout, ranges_text
from rvdcomm.program.arena import Arena, Staged
from rvdcomm.program.instructions import (
    NO_BUFFER,
    Buffer,
    Collective,
    Copy,
    Instruction,
    connected,
)
from rvdcomm.program.shards import (
    DST,
    SRC,
    Transition,
    is_shard,
    lift,
    shard_index,
    shard_name,
)
from rvdcomm.program.text import TextReader


@dataclass(frozen=True)
class Program:
    """Instructions of all ranks, in one global order; ``str`` and ``parse`` are inverses.

    Staging buffers and messages are of ``dtype``; a copy from or to a shard of another dtype
    converts. Boxes are of a view of the tensor, whose dims may be parts of the tensor's dims. In a
    program of several tensors the first dim of every box is the index of its tensor (``lift``), so
    that boxes of two tensors never overlap.

    ``members`` are the ranks that were lowered, None for all ranks. A program of some ranks does
    not say where other ranks' data lie, and cannot be verified.
    """

    transitions: tuple[Transition, ...]
    dtype: str
    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]
    members: tuple[int, ...] | None = None

    @property
    def src(self) -> Layout:
        """The layout that the tensor has, in a program of one tensor."""
        (transition,) = self.transitions
        return transition.src

    @property
    def dst(self) -> Layout:
        """The layout that the tensor gets, in a program of one tensor."""
        (transition,) = self.transitions
        return transition.dst

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of staging."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        layouts = {layout for x in self.transitions for layout in (x.src, x.dst)}
        return tuple(sorted({rank for layout in layouts for rank in layout.ranks}))

    @cached_property
    def num_dims(self) -> int:
        """Number of dims of every box."""
        dims = [transition.num_dims for transition in self.transitions]
        return dims[0] if len(dims) == 1 else 1 + max(dims)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks whose instructions the program has, ascending."""
        return self.ranks if self.members is None else self.members

    def shard_names(self, rank: int) -> tuple[str, ...]:
        """The caller's buffers of ``rank``: its src shards, then its dst shards."""
        by_rank, equal = self._shard_names
        if rank not in by_rank:
            names = tuple(
                shard_name(side, i, len(self.transitions))
                for side in (SRC, DST)
                for i, transition in enumerate(self.transitions)
                if rank in transition.layout(side)
            )
            # Most ranks have equal names. One tuple serves them all, which saves memory for up to
            # a million ranks.
            by_rank[rank] = equal.setdefault(names, names)
        return by_rank[rank]

    @cached_property
    def _shard_names(
        self,
    ) -> tuple[dict[int, tuple[str, ...]], dict[tuple[str, ...], tuple[str, ...]]]:
        return {}, {}

    def transition(self, name: str) -> Transition:
        """The transition of the tensor that the caller's buffer ``name`` is a shard of."""
        return self.transitions[shard_index(name)]

    def shard_box(self, name: str, rank: int) -> Box:
        """The box of the caller's buffer ``name`` of ``rank``, in the dims of the program."""
        box = self.transition(name).box(name, rank)
        return box if len(self.transitions) == 1 else lift(box, shard_index(name), self.num_dims)

    def dtype_of(self, name: str) -> str:
        """The dtype of a buffer."""
        return self.transition(name).dtype(name) if is_shard(name) else self.dtype

    @cached_property
    def buffer(self) -> dict[tuple[str, int], Buffer]:
        """Buffers by (name, rank)."""
        return {(buffer.name, buffer.rank): buffer for buffer in self.buffers}

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The instructions that send messages."""
        return tuple(i for i in self.instructions if isinstance(i, Collective))

    def traffic(self) -> Iterator[tuple[int, tuple[int, int], int]]:
        """(step, (from rank, to rank), elements) of every message and read of another's memory."""
        for one in self.instructions:
            if isinstance(one, Collective):
                for pair, num_elements in one.traffic().items():
                    yield one.step, pair, num_elements
            elif isinstance(one, Copy) and one.is_remote:
                yield one.step, (one.src_rank, one.rank), one.num_elements

    @cached_property
    def num_steps(self) -> int:
        """Steps with calls or reads; the last ones may have no messages."""
        calls = (one for one in self.instructions if isinstance(one, Collective | Copy))
        steps = (o.step for o in calls if isinstance(o, Collective) or o.is_remote)
        return 1 + max(steps, default=0)

    @cached_property
    def peer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that read each other's memory, as disjoint groups, each ascending."""
        remote = [i.ranks for i in self.instructions if isinstance(i, Copy) and i.is_remote]
        return connected(set(remote))

    def of_rank(self, rank: int) -> Iterator[Instruction]:
        """Instructions that ``rank`` takes part in."""
        for instruction in self.instructions:
            if rank in instruction.ranks:
                yield instruction

    def lifetimes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Indices of the first and last instruction that use each staging buffer of ``rank``."""
        return self._lifetimes.get(rank, {})

    @cached_property
    def _lifetimes(self) -> dict[int, dict[str, tuple[int, int]]]:
        first: dict[int, dict[str, int]] = {rank: {} for rank in self.here}
        last: dict[int, dict[str, int]] = {rank: {} for rank in self.here}
        for i, instruction in enumerate(self.instructions):
            for rank in instruction.ranks:
                if rank in last:
                    for name in instruction.buffers_of(rank):
                        if name != NO_BUFFER and not is_shard(name):
                            first[rank].setdefault(name, i)
                            last[rank][name] = i
        return {
            rank: {name: (i, last[rank][name]) for name, i in born.items()}
            for rank, born in first.items()
        }

    def arena(self, rank: int) -> Arena:
        """Where the staging buffers of ``rank`` lie; buffers alive at once never overlap.

        Offsets are in bytes and aligned for any vector load.
        """
        if rank not in self._arenas:
            self._arenas[rank] = Arena.of(
                Staged(*lifetime, name, self.buffer[name, rank].num_elements * self.item_bytes)
                for name, lifetime in self.lifetimes(rank).items()
            )
        return self._arenas[rank]

    @cached_property
    def _arenas(self) -> dict[int, Arena]:
        return {}

    def peak_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` needs at once: its src and dst shards and its arena."""
        return self.shard_bytes(rank) + self.arena(rank).num_bytes

    def shard_bytes(self, rank: int) -> int:
        """Bytes of the src and dst shards of ``rank``."""
        return sum(
            self.buffer[name, rank].num_elements * ITEM_BYTES[self.dtype_of(name)]
            for name in self.shard_names(rank)
        )

    def __str__(self) -> str:
        lines = [f"program {self.dtype}"]
        if self.members is not None:
            lines[0] += f" of {ranges_text(self.members)}"
        for transition in self.transitions:
            lines += transition.lines(self.dtype)
        for buffer in self.buffers:
            pieces = " ".join(map(str, buffer.pieces))
            lines.append(f"buffer {buffer.name} rank {buffer.rank}: {pieces}".rstrip())
        for instruction in self.instructions:
            lines.extend(instruction.lines())
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read the text that ``str`` writes."""
        return cls(*TextReader(text).read())
