"""Simulate: run a program for all ranks in one process with numpy. This is the meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvdcomm.box import Box
from rvdcomm.errors import ShapeMismatchError
from rvdcomm.planner import Plan
from rvdcomm.program import DST, SRC, Buffer, Collective, Copy, Message, Program, Zero

Array = NDArray[Any]


@dataclass(frozen=True)
class SimulationResult:
    """What a simulated run leaves.

    Attributes:
        shards: every dst rank's shard, shaped as its box.
        recv_bytes, sent_bytes: bytes from and to *other* ranks, by rank.
        peak_bytes: bytes of all buffers alive at once, by rank, src and dst shards included.
    """

    shards: dict[int, Array]
    recv_bytes: dict[int, int]
    sent_bytes: dict[int, int]
    peak_bytes: dict[int, int]

    @property
    def wire_bytes(self) -> int:
        """Bytes sent by all ranks together."""
        return sum(self.sent_bytes.values())


def simulate(plan: Plan, shards: Mapping[int, Array]) -> SimulationResult:
    """Run ``plan`` on ``{rank: shard}`` without processes: no process group, no GPU.

    >>> import numpy as np
    >>> from rvdcomm import Layout, plan
    >>> src, dst = Layout((4,), "R(1)V(2)D(1)"), Layout((4,), "R(1)V(1)D(2)")
    >>> result = simulate(plan(src, dst), {r: np.full(4, r + 1, np.float32) for r in (0, 1)})
    >>> result.shards[1], result.recv_bytes[1]
    (array([3., 3.], dtype=float32), 8)

    Raises:
        ShapeMismatchError: a shard is missing, or has another shape or size of element.
    """
    return simulate_program(plan.program, shards)


def simulate_program(program: Program, shards: Mapping[int, Array]) -> SimulationResult:
    """Run ``program`` on ``shards``, one array for every src rank; inputs are not modified.

    Raises:
        ShapeMismatchError: a shard is missing, or has another shape or size of element.
    """
    _check(program, shards)
    return _Simulation(program, shards).run()


def _check(program: Program, shards: Mapping[int, Array]) -> None:
    what = f"simulate {program.src.rvd} -> {program.dst.rvd}"
    for rank in sorted({*program.src.ranks, *shards}):
        if rank not in program.src:
            raise ShapeMismatchError(f"{what}: rank {rank} passed a shard but is not in src.")
        want = list(program.src.cell(rank).box.shape)
        if rank not in shards:
            raise ShapeMismatchError(f"{what}: rank {rank} passed no shard, its shard is {want}.")
        got = shards[rank]
        if list(got.shape) != want:
            raise ShapeMismatchError(
                f"{what}: rank {rank} passed {list(got.shape)}, its shard is {want}."
            )
        if _is_other(got.dtype.name, program.dtype) or got.itemsize != program.item_bytes:
            raise ShapeMismatchError(
                f"{what}: rank {rank} passed {got.dtype}, the plan is for {program.dtype}."
            )


def _poisoned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory in which whatever is read before it is written shows in the result."""
    return np.full(num_bytes, 0xA5, np.uint8)


def _is_other(name: str, dtype: str) -> bool:
    """Whether the array's dtype is known and is not the plan's; raw bits may stand for others."""
    stands_for = dtype.startswith(("bfloat16", "float8")) and name.startswith("uint")
    return name != dtype and not stands_for


class _Simulation:
    """Buffers of all ranks: shards as flat arrays of their own, staging in one arena a rank."""

    def __init__(self, program: Program, shards: Mapping[int, Array]) -> None:
        self.program = program
        self.dtype = next(iter(shards.values())).dtype
        self.flat: dict[tuple[str, int], Array] = {}
        self.arena: dict[int, NDArray[np.uint8]] = {}
        self.offsets: dict[tuple[str, int], list[int]] = {}
        self.recv = dict.fromkeys(program.ranks, 0)
        self.sent = dict.fromkeys(program.ranks, 0)
        self.peak = {rank: self._allocate(rank) for rank in program.ranks}
        for rank in program.src.ranks:
            self.flat[SRC, rank][:] = shards[rank].reshape(-1)

    def _allocate(self, rank: int) -> int:
        """Make all memory of a rank, and return how many bytes that is."""
        arena = self.program.arena(rank)
        memory = self.arena[rank] = _poisoned(arena.num_bytes)
        num_bytes = memory.nbytes
        for name, offset in arena.offsets.items():
            size = self.program.buffer[name, rank].num_elements * self.program.item_bytes
            self.flat[name, rank] = memory[offset : offset + size].view(self.dtype)
        for name in (SRC, DST):
            if (name, rank) in self.program.buffer:
                count = self.program.buffer[name, rank].num_elements
                shard = _poisoned(count * self.program.item_bytes)
                self.flat[name, rank] = shard.view(self.dtype)
                num_bytes += shard.nbytes
        return num_bytes

    def run(self) -> SimulationResult:
        runners = {Copy: self._copy, Zero: self._zero, Collective: self._collective}
        for instruction in self.program.instructions:
            runners[type(instruction)](instruction)  # type: ignore[operator]
        return SimulationResult(self.results(), self.recv, self.sent, self.peak)

    def results(self) -> dict[int, Array]:
        """Every dst rank's shard."""
        dst = self.program.dst
        return {r: self.flat[DST, r].reshape(dst.cell(r).box.shape) for r in sorted(dst.ranks)}

    def _offsets(self, buffer: Buffer) -> list[int]:
        """Element offsets of all pieces, summed up once: after a gather there are many."""
        key = buffer.name, buffer.rank
        if key not in self.offsets:
            sizes = (piece.num_elements for piece in buffer.pieces)
            self.offsets[key] = list(accumulate(sizes, initial=0))
        return self.offsets[key]

    def _view(self, name: str, rank: int, piece: int, box: Box) -> Array:
        buffer = self.program.buffer[name, rank]
        outer = buffer.pieces[piece]
        start = self._offsets(buffer)[piece]
        flat = self.flat[name, rank][start : start + outer.num_elements]
        # The ellipsis keeps a scalar an array that can be written.
        index: tuple[Any, ...] = (..., *box.slices_within(outer))
        view: Array = flat.reshape(outer.shape)[index]
        return view

    def _copy(self, copy: Copy) -> None:
        if copy.is_remote:
            num_bytes = copy.num_elements * self.program.item_bytes
            self.sent[copy.src_rank] += num_bytes
            self.recv[copy.rank] += num_bytes
        for e in copy.entries:
            src = self._view(copy.src, copy.src_rank, e.src_piece, e.box)
            dst = self._view(copy.dst, copy.rank, e.dst_piece, e.box)
            np.copyto(dst, src) if copy.op == "copy" else np.add(dst, src, out=dst)

    def _zero(self, zero: Zero) -> None:
        for e in zero.entries:
            self._view(zero.dst, zero.rank, e.dst_piece, e.box)[...] = 0

    def _collective(self, collective: Collective) -> None:
        for (a, b), num_elements in collective.traffic().items():
            self.sent[a] += num_elements * self.program.item_bytes
            self.recv[b] += num_elements * self.program.item_bytes
        src = dict(zip(collective.ranks, collective.src, strict=True))
        dst = dict(zip(collective.ranks, collective.dst, strict=True))
        if collective.kind == "all_reduce":
            self._all_reduce(collective.messages, dst)
            return
        for m in collective.messages:
            for e in m.entries:
                value = self._view(src[m.src_rank], m.src_rank, e.src_piece, e.box)
                self._view(dst[m.dst_rank], m.dst_rank, e.dst_piece, e.box)[...] = value

    def _all_reduce(self, messages: tuple[Message, ...], name: dict[int, str]) -> None:
        """Sum in ascending order of ranks, which in every group is the order of parts."""
        for i in range(len(messages[0].entries)):
            views = []
            for m in messages:
                e = m.entries[i]
                views.append(self._view(name[m.src_rank], m.src_rank, e.dst_piece, e.box))
            total = views[0].copy()
            for view in views[1:]:
                total += view
            for view in views:
                view[...] = total
