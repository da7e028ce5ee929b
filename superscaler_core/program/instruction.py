"""Instruction: one thing that devices do; a step program is made of them.

Inside a stage that is a ``StepInstruction``, between stages a tensor's ``Carry``. A stage at work
on a microbatch, an ``Action`` of the schedule, stands for all instructions of the stage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.schedules import Action, ScheduleError


class Verb(StrEnum):
    """What an instruction does; its value is how texts write it."""

    FORWARD = "F"
    """Run a segment, and keep what its backward needs."""
    COMPUTE = "f"
    """Run a segment, and keep nothing of it."""
    HOLD = "hold"
    """Keep what a segment is given, because its backward runs it again by itself."""
    BACKWARD = "B"
    """The gradients of what a segment was given, and of its weights."""
    KEEP = "keep"
    """Keep what enters a span, which the backward runs again as a whole."""
    RESUME = "resume"
    """Take what was kept of a span: what follows runs it again."""
    MOVE = "move"
    """An edge inside the stage takes its value along."""
    MOVE_BACK = "move-back"
    """It takes the gradient of the value back."""
    GATHER = "gather"
    """The weights of a window come to where they are read."""
    RELEASE = "release"
    """The weights of a window are dropped where they were gathered."""
    REDUCE = "reduce"
    """The gradients of a window's weights go to where these are stored."""


COMPUTING = frozenset({Verb.FORWARD, Verb.COMPUTE, Verb.BACKWARD})
"""What runs a segment, which one device does by itself."""

_CARRY = re.compile(r"(carry|carry-back) (\S+) ([0-9]{1,9})")
_TEXT = re.compile(rf"({'|'.join(Verb)}) (\S+) on ([0-9]+(?:,[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class StepInstruction:
    """What devices do together, or one device by itself.

    Law (tests/superscaler_core/program/test_step_program.py): ``parse`` reads what ``str`` writes.

    Attributes:
        kind: what is done.
        name: of the segment, edge, window or span that it is done with. Every device has segments
            of its own, which have the same names.
        devices: that take part, ascending.
        what: the segment, edge or window itself; None if the instruction was read from a text.
    """

    kind: Verb
    name: str
    devices: tuple[Device, ...]
    what: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name} on {','.join(map(str, self.devices))}"

    @classmethod
    def parse(cls, text: str) -> StepInstruction:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: it has another form.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"cannot read the instruction {text.strip()[:80]!r}: it is a kind, a name and the "
                f"devices, such as 'F stage0_segment1 on 0'; kinds are {', '.join(Verb)}."
            )
        return cls(Verb(found[1]), found[2], tuple(map(int, found[3].split(","))))


@dataclass(frozen=True, slots=True)
class Carry:
    """An edge between stages or turns takes a microbatch's tensor along, or its gradient back.

    Attributes:
        name: of the edge.
        microbatch: which.
        is_back: whether the gradient goes back.
        edge: the edge itself; None if the event was read from a text.
    """

    name: str
    microbatch: int
    is_back: bool
    edge: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{'carry-back' if self.is_back else 'carry'} {self.name} {self.microbatch}"


Event = Action | Carry
"""A stage at work on a microbatch, or a tensor on its way between stages."""


def parse_event(text: str) -> Event:
    """Read the text that ``str`` writes of an event.

    Raises:
        PlanError: it has another form.
    """
    carried = _CARRY.fullmatch(text)
    if carried is not None:
        return Carry(carried[2], int(carried[3]), carried[1] == "carry-back")
    try:
        return Action.parse(text)
    except ScheduleError as error:
        raise PlanError(str(error)) from None
