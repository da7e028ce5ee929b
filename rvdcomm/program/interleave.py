"""Interleave: the instructions of a tensor, slice by slice, and one order of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rvdcomm.program.instructions import Buffer, Instruction
from rvdcomm.program.shards import Transition


@dataclass(frozen=True)
class Lanes:
    """A path or trees as instructions: one lane per slice of the tensor, each a sequence of phases.

    Lanes are independent of each other. A phase ends where ranks begin to wait for others.
    ``staged`` says that every collective has buffers of its own. ``members`` are the ranks that
    were lowered; None for all ranks.
    """

    transition: Transition
    dtype: str
    staged: bool
    members: tuple[int, ...] | None
    buffers: tuple[Buffer, ...]
    lanes: tuple[tuple[tuple[Instruction, ...], ...], ...]


def interleaved(lanes: Sequence[Sequence[Sequence[Instruction]]]) -> list[Instruction]:
    """The instructions of all lanes, each lane one phase behind the lane before it.

    In beat b, lane i runs its phase b - i. Within a beat the lanes with the earliest phases come
    first. The transfers that they start overlap with the work of the other lanes on data that has
    arrived.
    """
    longest = max(map(len, lanes), default=0)
    return [
        instruction
        for beat in range(longest + len(lanes) - 1)
        for index in range(min(beat, len(lanes) - 1), max(beat - longest, -1), -1)
        if beat - index < len(lanes[index])
        for instruction in lanes[index][beat - index]
    ]
