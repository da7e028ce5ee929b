"""Local: copies, sums and zeros of one rank with torch alone, where the native core is not used."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from rvdcomm.layout import Box
from rvdcomm.program import Copy, Program, Zero, is_shard
from rvdcomm.run.call_memory import CallMemory

_ADD_AS = {
    # Two's complement: the sum of the bits is the same, signed or not.
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_ADD_IN = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}


def add_into(dst: Tensor, src: Tensor) -> None:
    """``dst += src`` for every dtype that has a sum, also where torch has no kernel for it."""
    if dst.dtype in _ADD_AS:
        dst.view(_ADD_AS[dst.dtype]).add_(src.view(_ADD_AS[src.dtype]))
    elif dst.dtype in _ADD_IN:
        wide = _ADD_IN[dst.dtype]
        dst.copy_(dst.to(wide) + src.to(wide))
    else:
        dst.add_(src)


def operation(
    program: Program, rank: int, instruction: Copy | Zero
) -> Callable[[CallMemory], None]:
    """A function that runs ``instruction``, with one tensor operation per box."""
    dst = [_view(program, rank, instruction.dst, e.dst_piece, e.box) for e in instruction.entries]
    if isinstance(instruction, Zero):

        def zero(call: CallMemory) -> None:
            for view in dst:
                view(call).zero_()

        return zero
    src = [_view(program, rank, instruction.src, e.src_piece, e.box) for e in instruction.entries]
    is_copy = instruction.op == "copy"

    def copy(call: CallMemory) -> None:
        for target, source in zip(dst, src, strict=True):
            if is_copy:
                target(call).copy_(source(call))
            else:
                add_into(target(call), source(call))

    return copy


def _view(
    program: Program, rank: int, name: str, piece: int, box: Box
) -> Callable[[CallMemory], Tensor]:
    """A function that returns a strided view of ``box`` in a piece of a buffer."""
    buffer = program.buffer[name, rank]
    outer = buffer.pieces[piece]
    if is_shard(name):
        # The caller's tensor may be strided: its dims are split and it is sliced, but a copy never
        # needs it contiguous.
        within = box.slices_within(outer)
        return lambda call: call.shards[name].view(outer.shape)[within]
    stride = [prod(outer.shape[d + 1 :]) for d in range(len(outer.shape))]
    starts = (s.start * step for s, step in zip(box.slices_within(outer), stride, strict=True))
    start = call_offset(program, rank, name) + buffer.offset(piece) + sum(starts)

    def get(call: CallMemory) -> Tensor:
        block = call.block(name)
        return block.as_strided(box.shape, stride, block.storage_offset() + start)

    return get


def call_offset(program: Program, rank: int, name: str) -> int:
    """Offset of a buffer in its block of memory, in elements; every shard is its own block."""
    return program.arena(rank).offsets.get(name, 0) // program.item_bytes
