"""Simulate: run a program for all ranks in one process with numpy.

This defines the meaning of all instructions; executors give the same results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvdcomm.errors import ShapeMismatchError
from rvdcomm.layout import ITEM_BYTES, Box
from rvdcomm.plans.plan import Plan
from rvdcomm.program import (
    SRC,
    BufferKey,
    Collective,
    Copy,
    Instruction,
    Message,
    Program,
    Zero,
    is_src,
)

Array = NDArray[Any]


@dataclass(frozen=True)
class SimulationResult:
    """The results and the counts of a simulated run.

    Attributes:
        shards: the shard of every dst rank, in the shape of its box.
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
        ShapeMismatchError: a shard is missing, or has another shape or dtype. Unsigned integers may
            hold the bits of bfloat16 and float8 values, unless the plan sums values.
    """
    return simulate_program(plan.program, shards)


def simulate_program(program: Program, shards: Mapping[int, Array]) -> SimulationResult:
    """Run ``program`` on ``shards``, one array for every src rank; inputs are not modified.

    Raises:
        ShapeMismatchError: as of ``simulate``.
    """
    _check(program, shards)
    done = Simulation(program, {(SRC, rank): shard for rank, shard in shards.items()})
    done.run()
    results = {rank: shard for (_, rank), shard in done.results().items()}
    return SimulationResult(results, done.recv, done.sent, done.peak)


def _check(program: Program, shards: Mapping[int, Array]) -> None:
    what = f"simulate {program.src.rvd} -> {program.dst.rvd}"
    sums = any(map(_is_sum, program.instructions))
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
        if got.dtype.name == program.dtype:
            continue
        if not _may_hold_bits(got.dtype, program):
            raise ShapeMismatchError(
                f"{what}: rank {rank} passed {got.dtype}, the plan is for {program.dtype}."
            )
        if sums:
            raise ShapeMismatchError(
                f"{what}: rank {rank} passed {got.dtype}, and the plan sums {program.dtype}: a sum "
                "of bits is no sum of values."
            )


def _poisoned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory filled with one unusual byte, so that a read before the first write shows up."""
    return np.full(num_bytes, 0xA5, np.uint8)


def _may_hold_bits(dtype: np.dtype[Any], program: Program) -> bool:
    """Whether these are unsigned integers, and the program is for a dtype that numpy lacks."""
    is_lacking = program.dtype.startswith(("bfloat16", "float8"))
    return is_lacking and dtype.kind == "u" and dtype.itemsize == program.item_bytes


def _is_sum(instruction: Instruction) -> bool:
    if isinstance(instruction, Copy):
        return instruction.op == "add"
    return isinstance(instruction, Collective) and instruction.kind == "all_reduce"


class Simulation:
    """One simulated run: the buffers of all ranks, and the bytes that each rank sends and receives.

    Every shard is a flat array of its own. The staging of a rank lies in one arena.
    """

    def __init__(self, program: Program, shards: Mapping[BufferKey, Array]) -> None:
        self.program = program
        # Arrays of unsigned integers may hold the bits of a dtype that numpy does not have.
        self.dtypes = {program.dtype_of(name): shard.dtype for (name, _), shard in shards.items()}
        self.flat: dict[BufferKey, Array] = {}
        self.arena: dict[int, NDArray[np.uint8]] = {}
        self.recv = dict.fromkeys(program.ranks, 0)
        self.sent = dict.fromkeys(program.ranks, 0)
        self.peak = {rank: self._allocate(rank) for rank in program.ranks}
        for home, shard in shards.items():
            self.flat[home][:] = shard.reshape(-1)

    def _allocate(self, rank: int) -> int:
        """Allocate all memory of a rank, and return its number of bytes."""
        arena = self.program.arena(rank)
        memory = self.arena[rank] = _poisoned(arena.num_bytes)
        num_bytes = memory.nbytes
        for name, offset in arena.offsets.items():
            size = self.program.buffer[name, rank].num_elements * self.program.item_bytes
            self.flat[name, rank] = memory[offset : offset + size].view(self._dtype(name))
        for name in self.program.shard_names(rank):
            count = self.program.buffer[name, rank].num_elements
            shard = _poisoned(count * ITEM_BYTES[self.program.dtype_of(name)])
            self.flat[name, rank] = shard.view(self._dtype(name))
            num_bytes += shard.nbytes
        return num_bytes

    def _dtype(self, name: str) -> Any:
        dtype = self.program.dtype_of(name)
        return self.dtypes.get(dtype) or np.dtype(dtype)

    def run(self) -> None:
        runners = {Copy: self._copy, Zero: self._zero, Collective: self._collective}
        for instruction in self.program.instructions:
            runners[type(instruction)](instruction)  # type: ignore[operator]

    def results(self) -> dict[BufferKey, Array]:
        """Every dst shard, in the shape of its box."""
        return {
            (name, rank): self.flat[name, rank].reshape(
                self.program.transition(name).dst.cell(rank).box.shape
            )
            for rank in self.program.ranks
            for name in self.program.shard_names(rank)
            if not is_src(name)
        }

    def _view(self, name: str, rank: int, piece: int, box: Box) -> Array:
        buffer = self.program.buffer[name, rank]
        outer = buffer.pieces[piece]
        start = buffer.offset(piece)
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
            if copy.op == "copy":
                np.copyto(dst, src, casting="unsafe")
            else:
                np.add(dst, src, out=dst)

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
        """Sum in ascending order of ranks, which is the order of parts in every group."""
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
