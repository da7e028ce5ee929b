"""Split backward: a rewrite that computes gradients of weights while other gradients move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from superscaler_core.plan import Device
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import Verb


def split_backward(program: StepProgram) -> StepProgram:
    """Split the backward of a segment where a gradient moves right after it on its device.

    The half for weights comes right before the move, which may start before it, directly after the
    half for inputs (``program.overlap``).
    """
    blocks = {key: _split(block) for key, block in program.blocks.items()}
    return replace(program, blocks=blocks)


def _split(block: Block) -> Block:
    done: list[StepInstruction] = []
    last: dict[Device, int] = {}
    for now in block:
        moves = now.kind is Verb.MOVE_BACK and not now.stays
        before = {last[d] for d in now.devices if d in last} if moves else ()
        whole = [place for place in sorted(before) if _has_weights(done[place])]
        weights = []
        for place in whole:
            done[place], late = in_halves(done[place])
            weights.append(late)
        for instruction in (*weights, now):
            last |= dict.fromkeys(instruction.devices, len(done))
            done.append(instruction)
    return tuple(done)


def _has_weights(instruction: StepInstruction) -> bool:
    """Whether this is a whole backward that computes gradients of weights."""
    is_whole = instruction.kind is Verb.BACKWARD
    return is_whole and any(value.role is Role.SUM for value in instruction.writes)


def in_halves(backward: StepInstruction) -> tuple[StepInstruction, StepInstruction]:
    """The backward of a segment as two instructions: for its inputs, and for its weights."""
    kept, sums = Value(Role.HALF, backward.name), _of(backward.writes, Role.SUM)
    grads = tuple(value for value in backward.writes if value.role is not Role.SUM)
    weights = _of(backward.reads, Role.COPY, Role.WEIGHT)
    first = replace(backward, kind=Verb.BACKWARD_INPUTS, writes=(*grads, kept))
    late = replace(
        backward, kind=Verb.BACKWARD_WEIGHTS, reads=(*weights, kept), writes=sums, frees=(kept,)
    )
    return first, late


def _of(values: Iterable[Value], *roles: Role) -> tuple[Value, ...]:
    return tuple(value for value in values if value.role in roles)
