"""Well-formed: checks of a program before it is run or verified.

A program may come from a file. After these checks it names only ranks, buffers and dims that exist,
and the verifier relies on that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rvdcomm.errors import LayoutError, ProgramError
from rvdcomm.layout import Box, check_summable, dtype_name
from rvdcomm.program.instructions import NO_BUFFER, Collective, Copy, Zero
from rvdcomm.program.program import Program
from rvdcomm.program.shards import Transition, is_shard


def check_form(program: Program) -> None:
    """Raise a ProgramError if the program names ranks, buffers or dims that do not exist.

    Checked: the two layouts have one shape, and value parts only if the dtype has a sum. Shards are
    boxes of the view. Every buffer is declared once, for a rank of the program, and src and dst
    only for ranks of their layout. Instructions name declared buffers. Boxes have the dims of the
    view. No collective has two messages between the same ranks.
    """
    for transition in program.transitions:
        _check_layouts(program.dtype, transition)
    _check_buffers(program)
    num_dims, num_tensors = program.num_dims, len(program.transitions)
    for box in boxes_of(program):
        if len(box.lo) != num_dims:
            raise ProgramError(f"{box} has {len(box.lo)} dims, the tensor has {num_dims}.")
        if num_tensors > 1 and not (0 <= box.lo[0] < num_tensors and box.hi[0] == box.lo[0] + 1):
            raise ProgramError(f"{box} is of none of the {num_tensors} tensors.")
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Collective):
            _check_messages(i, instruction)
        else:
            _check_names(i, instruction, program)


def boxes_of(program: Program) -> Iterator[Box]:
    """Pieces of all buffers, then the boxes of all instructions."""
    for buffer in program.buffers:
        yield from buffer.pieces
    for instruction in program.instructions:
        lists = instruction.messages if isinstance(instruction, Collective) else (instruction,)
        for each in lists:
            yield from (entry.box for entry in each.entries)


def _check_layouts(dtype: str, transition: Transition) -> None:
    src, dst = transition.src, transition.dst
    try:
        check_summable(dtype_name(dtype), [src, dst])
    except LayoutError as error:
        raise ProgramError(str(error)) from None
    if src.shape != dst.shape:
        raise ProgramError(f"src has the shape {src.shape}, dst {dst.shape}.")
    view = transition.view
    if view is None:
        return
    if view.shape != src.shape:
        raise ProgramError(f"dims {view} are not those of the shape {src.shape}.")
    for layout in (src, dst):
        try:
            view.check_cuts(layout.cuts)
        except LayoutError as error:
            raise ProgramError(f"a shard of {layout}: {error}") from None


def _check_buffers(program: Program) -> None:
    counts = Counter((buffer.name, buffer.rank) for buffer in program.buffers)
    ranks = set(program.ranks)
    for (name, rank), count in counts.items():
        if count > 1:
            raise ProgramError(f"buffer {name} of rank {rank} is declared twice.")
        if name == NO_BUFFER:
            raise ProgramError(f"rank {rank} has a buffer named {NO_BUFFER}, which means none.")
        if rank not in ranks:
            raise ProgramError(f"buffer {name}: rank {rank} is in neither layout.")
        if is_shard(name) and name not in program.shard_names(rank):
            raise ProgramError(f"buffer {name} of rank {rank}, which is not in {name}.")


def _check_names(index: int, instruction: Copy | Zero, program: Program) -> None:
    for rank in instruction.ranks:
        for name in sorted(instruction.buffers_of(rank) - {NO_BUFFER}):
            if (name, rank) not in program.buffer:
                raise ProgramError(f"instruction {index}: rank {rank} has no buffer {name}.")


def _check_messages(index: int, collective: Collective) -> None:
    counts = Counter((m.src_rank, m.dst_rank) for m in collective.messages)
    twice = next((pair for pair, count in counts.items() if count > 1), None)
    if twice is not None:
        what = f"instruction {index}: {collective.kind}"
        raise ProgramError(f"{what}: two messages {twice[0]}->{twice[1]}.")
    if collective.kind == "all_reduce" and NO_BUFFER in (*collective.src, *collective.dst):
        raise ProgramError(f"instruction {index}: all_reduce: every rank has to name a buffer.")
