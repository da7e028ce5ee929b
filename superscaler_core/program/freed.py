"""Freed: after which instruction a value of a stage's run is not needed any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from superscaler_core.plan import Device
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.value import IN_BLOCK, SUMMED, Role, Value

if TYPE_CHECKING:
    from superscaler_core.program.step_program import StepProgram

Key = tuple[Role, str, int | None]
"""A value of a run, with the half of the microbatch."""


def freed(program: StepProgram) -> StepProgram:
    """A program in which the last reader of a value of a run frees it, on every device.

    Values that leave a run are freed by the instructions that take them, whatever the order
    (``verb.OWN``).
    """
    return replace(
        program,
        blocks={key: freed_block(block) for key, block in program.blocks.items()},
        pairs={key: freed_block(block) for key, block in program.pairs.items()},
    )


def freed_block(block: Sequence[StepInstruction]) -> Block:
    """The instructions of a block, with what each of them frees."""
    # Devices on which an instruction further down reads a value.
    later: dict[Key, set[Device]] = {}
    return tuple(reversed([_freed(instruction, later) for instruction in reversed(block)]))


def _freed(instruction: StepInstruction, later: dict[Key, set[Device]]) -> StepInstruction:
    """An instruction with what it frees, given what is read after it; the rest is kept."""
    frees = tuple(_last(instruction, later))
    for value in instruction.writes:
        # What is added to a sum before is read too.
        if value.role in IN_BLOCK - SUMMED:
            later.setdefault(_key(value, instruction), set()).difference_update(
                value.devices or instruction.devices
            )
    for value in instruction.reads:
        if value.role in IN_BLOCK:
            later.setdefault(_key(value, instruction), set()).update(
                value.devices or instruction.devices
            )
    return instruction.freeing(frees)


def _last(instruction: StepInstruction, later: dict[Key, set[Device]]) -> Iterator[Value]:
    """What an instruction frees, in the order in which it names the values."""
    kept = {value.key: value for value in instruction.frees if value.role not in IN_BLOCK}
    for value in dict.fromkeys((*instruction.reads, *instruction.writes)):
        if value.key in kept:
            yield kept[value.key]
        elif value.role in IN_BLOCK:
            devices = value.devices or instruction.devices
            done = set(devices) - later.get(_key(value, instruction), set())
            if done:
                yield value.on(done, instruction.devices) if len(done) < len(devices) else value


def _key(value: Value, instruction: StepInstruction) -> Key:
    return value.role, value.name, instruction.half
