"""Value: one tensor that a step makes, by its name; instructions say which values they use."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from superscaler_core.errors import PlanError
from superscaler_core.graph.name_text import name_of, name_text
from superscaler_core.plan import Device


class Role(StrEnum):
    """What a value is; the value of a member is its spelling before the name in texts."""

    RESULT = "r"
    """A result of an op that leaves its segment; the name is the tensor's."""
    ARRIVED = "e"
    """What an edge brings to its readers."""
    PARTIAL = "part"
    """What a device adds up, result by result, of the sum that an edge moves."""
    INPUT = "in"
    """A part of the batch."""
    CONSTANT = "const"
    """A value of the model that no step changes."""
    STATE = "state"
    """A buffer that every microbatch replaces."""
    WEIGHT = "w"
    """A copy of a weight that exists all the time."""
    COPY = "copy"
    """A copy of a weight that a step fetches or gathers."""
    GRAD = "d"
    """What one reader adds to the gradient of a value; the name is the value's, then the reader."""
    SUM = "sum"
    """The gradient of a copy of a weight, summed over microbatches."""
    STORED = "grad"
    """The gradient of a parameter where it is stored."""
    LOSS = "loss"
    """A device's part of the loss, summed over microbatches."""
    TOTAL = "total"
    """The loss of the step."""
    VERSION = "version"
    """A version of a stage's weights."""
    KEPT = "kept"
    """What a segment, or a region, keeps for its backward."""
    HALF = "half"
    """What the backward of a segment for inputs keeps for the one for weights."""
    HOST = "host"
    """What a segment keeps, in host memory."""
    OUT = "out"
    """What a stage leaves for a transfer to another stage or pass, or out of the program."""
    OUT_BACK = "out-back"
    """A gradient that a stage leaves for a transfer back."""
    SENT = "sent"
    """What such a transfer has brought, before its stage takes it."""
    SENT_BACK = "sent-back"
    """The same for a gradient."""
    FLIGHT = "flight"
    """A communication that was started and not waited for."""


GIVEN = frozenset({Role.INPUT, Role.CONSTANT, Role.STATE, Role.WEIGHT})
"""Roles of values that exist before the step."""

SUMMED = frozenset({Role.PARTIAL, Role.SUM, Role.STORED, Role.LOSS})
"""Roles of values that several instructions add to."""

OF_STEP = frozenset(
    {Role.WEIGHT, Role.COPY, Role.SUM, Role.STORED, Role.LOSS, Role.TOTAL, Role.VERSION}
)
"""Roles of values that all microbatches share."""

IN_BLOCK = frozenset({Role.RESULT, Role.ARRIVED, Role.PARTIAL, Role.GRAD})
"""Roles of values that live only while a stage runs."""

NUMBERS = "[0-9]{1,9}(?:,[0-9]{1,9})*"
"""Devices in a text."""

_ROLES = "|".join(sorted((role for role in Role), key=len, reverse=True))
_TEXT = re.compile(rf"(?:({_ROLES}):)?(.*?)(?:@\(({NUMBERS})\))?")
_NEEDS_ROLE = re.compile(rf"~|(?:{_ROLES}):")
"""How names of results begin that a reader would take for something else."""


@dataclass(frozen=True, slots=True, order=True)
class Value:
    """A tensor on the devices of an instruction, or on some of them.

    Law (tests/superscaler_core/program/test_value.py): ``Value.parse(str(v)) == v``.

    Attributes:
        role: what it is.
        name: its name among the values of its role.
        devices: the devices of the instruction that hold it, ascending; empty for all of them.
    """

    role: Role
    name: str
    devices: tuple[Device, ...] = ()
    key: str = field(init=False, repr=False, compare=False)
    """The role and the name: what identifies the value on a device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.role}:{self.name}")

    def __hash__(self) -> int:
        return hash(self.key)

    def on(self, devices: Collection[Device], instruction: Collection[Device]) -> Value:
        """The value on some of the devices of an instruction."""
        there = () if len(devices) == len(instruction) else tuple(sorted(devices))
        return self if there == self.devices else Value(self.role, self.name, there)

    def is_same(self, other: Value) -> bool:
        """Whether two instructions use one value, on the same devices or on others."""
        return self.key == other.key

    def __str__(self) -> str:
        name = _escaped(name_text(self.name))
        is_plain = self.role is Role.RESULT and not _NEEDS_ROLE.match(name)
        at = f"@({','.join(map(str, self.devices))})" if self.devices else ""
        return f"{'' if is_plain else f'{self.role}:'}{name}{at}"

    @classmethod
    def parse(cls, text: str) -> Value:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the name has an escape that Python does not know.
        """
        found = _TEXT.fullmatch(text)
        assert found is not None, "it matches every text on one line"
        devices = tuple(map(int, found[3].split(","))) if found[3] else ()
        role = Role(found[1] or Role.RESULT)
        try:
            name = name_of(found[2])
        except ValueError as error:
            raise PlanError(f"cannot read the value {text[:80]!r}: {error}") from None
        return cls(role, name, devices)


def _escaped(name: str) -> str:
    """A name in which no reader finds devices."""
    if "@(" not in name:
        return name
    escaped = name if "\\" in name else name.encode("unicode_escape").decode("ascii")
    return escaped.replace("@(", r"\x40(")
