"""Together: an instruction that several devices each do alone, and one for each of them.

In a program it is one instruction, so that whoever reads the program works once for all of them. In
a text every device has its own line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from superscaler_core.plan import Device
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.value import Value
from superscaler_core.program.verb import ALONE


class _Joined(tuple[StepInstruction, ...]):
    """A block that ``together`` has made."""


def together(block: Iterable[StepInstruction]) -> Block:
    """The instructions; those in a row that differ in their devices alone are one.

    An instruction that devices do alone with different values is one for each of them.

    Law (tests/superscaler_core/program/test_together.py): ``together(apart(block)) == block`` for a
    block that ``together`` has made.
    """
    if isinstance(block, _Joined):
        return block
    done: list[StepInstruction] = []
    for now in _plain(block):
        if done and now.kind in ALONE and _is_same(done[-1], now):
            devices = tuple(sorted((*done[-1].devices, *now.devices)))
            done[-1] = replace(done[-1], devices=devices)
        else:
            done.append(now)
    return _Joined(done)


def apart(block: Iterable[StepInstruction]) -> Iterator[StepInstruction]:
    """The instructions; what devices do alone is one instruction for each."""
    for now in block:
        if now.kind in ALONE and len(now.devices) > 1:
            yield from (_on(now, device) for device in now.devices)
        else:
            yield now


def _is_same(one: StepInstruction, other: StepInstruction) -> bool:
    """Whether two instructions are what different devices do alone."""
    return (
        one.kind is other.kind
        and one.name == other.name
        and set(one.devices).isdisjoint(other.devices)
        and replace(one, devices=other.devices) == other
    )


def _plain(block: Iterable[StepInstruction]) -> Iterator[StepInstruction]:
    """The instructions; where devices alone have different values, one for each device.

    One that names another device stays as it is, so that ``check`` refuses it.
    """
    for now in block:
        values = (*now.reads, *now.writes, *now.frees) if now.kind in ALONE else ()
        named = {device for value in values if value.devices for device in value.devices}
        if named and named.issubset(now.devices):
            yield from apart([now])
        else:
            yield now


def _on(instruction: StepInstruction, device: Device) -> StepInstruction:
    """What one of its devices does."""
    reads, writes, frees = (
        _held(values, device)
        for values in (instruction.reads, instruction.writes, instruction.frees)
    )
    return replace(instruction, devices=(device,), reads=reads, writes=writes, frees=frees)


def _held(values: tuple[Value, ...], device: Device) -> tuple[Value, ...]:
    if not any(value.devices for value in values):
        return values
    here = (value for value in values if not value.devices or device in value.devices)
    return tuple(Value(value.role, value.name) for value in here)
