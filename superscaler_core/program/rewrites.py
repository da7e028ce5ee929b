"""Rewrites: the order in which a step program is rewritten so that communication overlaps."""

from __future__ import annotations

from collections.abc import Iterable

from superscaler_core.plan.overlap import Overlap
from superscaler_core.program.duplex import duplex
from superscaler_core.program.kept_open import kept_open
from superscaler_core.program.overlap import OF_MOVES, Size, overlapped, reach_of
from superscaler_core.program.pairs import overlap_pairs
from superscaler_core.program.split_backward import split_backward
from superscaler_core.program.step_program import StepProgram
from superscaler_core.schedules import Action


def rewritten(
    program: StepProgram,
    overlap: Overlap,
    pairs: Iterable[tuple[Action, Action]] = (),
    bytes_of: Size = lambda _: 0,
) -> StepProgram:
    """A program with the overlap that a plan asks for.

    Moves come before duplex, which keeps what has started; weights come after it, because both
    halves share them; and pairs are overlapped from what all this has made of their stages.

    Args:
        program: the program without overlap.
        overlap: what the plan asks for.
        pairs: the pairs of the schedule that run as one.
        bytes_of: the bytes of weights that a communication brings, for ``overlap.memory_bytes``.
    """
    if overlap.moves:
        program = overlapped(split_backward(program), OF_MOVES)
    if overlap.duplex:
        program = duplex(program)
    if overlap.prefetch:
        program = kept_open(program)
    return overlap_pairs(overlapped(program, reach_of(overlap), bytes_of), pairs)
