"""Effect: which values a sequence of instructions needs, makes and frees on a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import GIVEN, IN_BLOCK, OF_STEP, SUMMED, Role
from superscaler_core.program.verb import OF_WEIGHTS

_UNTRACKED = frozenset({*GIVEN, Role.VERSION})
"""Roles of values that exist before the step, and of weights' versions (``version_check``)."""

Key = str
"""A value on a device, as ``Value.key``; with "half 1 " before it if it is of the second half."""

HALVES = "", "half 1 "
"""What stands before the keys of values of the first half, or of all, and of the second half."""


@dataclass
class Effect:
    """What a sequence of instructions does on one device.

    It can run where all of ``needs`` exist and none of ``fresh``. If ``live`` are the values that
    exist before it, ``(live - frees) | makes`` exist after it.

    Law (tests/superscaler_core/program/test_check.py): the effect of a block is that of its
    instructions, one after another.

    Attributes:
        needs: values that exist before it.
        fresh: values that do not exist before it.
        frees: values that it frees, if they existed before it.
        makes: values that exist after it because of it.
    """

    needs: set[Key] = field(default_factory=set)
    fresh: set[Key] = field(default_factory=set)
    frees: set[Key] = field(default_factory=set)
    makes: set[Key] = field(default_factory=set)

    def read(self, key: Key) -> str:
        """Read a value; returns what is wrong, or nothing."""
        if key not in self.makes:
            if key in self.frees or key in self.fresh:
                return f"{key} was freed before"
            self.needs.add(key)
        return ""

    def free(self, key: Key, *, is_summed: bool) -> None:
        """Free a value that was read or written."""
        if key not in self.makes or is_summed:
            self.frees.add(key)
        self.makes.discard(key)

    def write(self, key: Key, *, is_summed: bool) -> str:
        """Write a value; returns what is wrong, or nothing."""
        if not is_summed:
            if key in self.makes:
                return f"{key} exists already"
            if key in self.needs and key not in self.frees:
                return f"{key} exists already, as it is read before"
            if key not in self.frees:
                self.fresh.add(key)
        self.makes.add(key)
        return ""


@dataclass
class Effects:
    """The effects of a sequence of instructions on some devices.

    Attributes:
        of_microbatch, of_step: by device, the effect on values of one microbatch (or two halves),
            and on those of the whole step.
    """

    of_microbatch: dict[Device, Effect] = field(default_factory=dict)
    of_step: dict[Device, Effect] = field(default_factory=dict)


class _Use(NamedTuple):
    """How an instruction uses a value.

    Attributes:
        key: the value.
        is_of_step: whether all microbatches share it.
        is_read: whether it is read, and not written.
        is_summed: whether several instructions add to it.
        devices: the devices that use it.
        gone: the devices that free it.
    """

    key: Key
    is_of_step: bool
    is_read: bool
    is_summed: bool
    devices: Collection[Device]
    gone: Collection[Device]


def _uses(instruction: StepInstruction) -> list[_Use]:
    """How an instruction uses its values, in order."""
    half, devices = HALVES[instruction.half or 0], instruction.devices
    freed = {value.key: value.devices or devices for value in instruction.frees}
    found = []
    for values, is_read in ((instruction.reads, True), (instruction.writes, False)):
        for value in values:
            if value.role not in _UNTRACKED:
                is_of_step = _is_of_step(value.role, instruction)
                key = value.key if is_of_step else half + value.key
                there, gone = value.devices or devices, freed.get(value.key, ())
                use = _Use(key, is_of_step, is_read, value.role in SUMMED, there, gone)
                found.append(use)
    return found


def _add(use: _Use, device: Device, effect: Effect) -> str:
    """Add the use of a value to the effect of those before it; returns what is wrong."""
    if use.is_read:
        wrong = effect.read(use.key)
    else:
        wrong = effect.write(use.key, is_summed=use.is_summed)
    if device in use.gone:
        effect.free(use.key, is_summed=use.is_summed)
    return wrong


def _is_of_step(role: Role, instruction: StepInstruction) -> bool:
    """Whether all microbatches share a value; a communication of weights serves all of them."""
    if role is Role.FLIGHT:
        return instruction.kind in OF_WEIGHTS
    return role in OF_STEP


def effects_of(
    block: Iterable[StepInstruction], devices: Iterable[Device], *, is_whole: bool = True
) -> Effects:
    """The effects of a block.

    Args:
        block: the instructions.
        devices: the devices to look at.
        is_whole: whether all values of a run are made and freed in it.

    Raises:
        PlanError: names the instruction and the value.
    """
    mine: dict[Device, list[StepInstruction]] = {device: [] for device in devices}
    made = Effects()
    for instruction in block:
        there = [device for device in mine if device in instruction.devices]
        for use in _uses(instruction) if there else ():
            for device in there:
                if device in use.devices:
                    effects = made.of_step if use.is_of_step else made.of_microbatch
                    wrong = _add(use, device, effects.setdefault(device, Effect()))
                    if wrong:
                        raise PlanError(f"{instruction.short}: device {device}: {wrong}.")
        for device in there:
            mine[device].append(instruction)
    for device, effect in made.of_microbatch.items() if is_whole else ():
        _check_local(mine[device], device, effect)
    return made


def _check_local(block: Iterable[StepInstruction], device: Device, effect: Effect) -> None:
    """All values of a run are made and freed in it."""
    for key in filter(_is_local, effect.needs):
        reader = next(i for i in block if _reads(i, key, device))
        raise PlanError(f"{reader.short}: device {device}: {key} is not made before it.")
    for key in filter(_is_local, effect.makes):
        raise PlanError(f"device {device}: nothing frees {key} after its last reader.")


_LOCAL = tuple(f"{half}{role}:" for half in HALVES for role in IN_BLOCK)


def _is_local(key: Key) -> bool:
    """Whether a value lives only while a stage runs."""
    return key.startswith(_LOCAL)


def _reads(instruction: StepInstruction, key: Key, device: Device) -> bool:
    half, devices = HALVES[instruction.half or 0], instruction.devices
    return any(half + v.key == key and device in (v.devices or devices) for v in instruction.reads)
