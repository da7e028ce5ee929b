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
    RERUN = "R"
    """Run a segment again that kept only what it was given, ahead of its backward."""
    BACKWARD = "B"
    """The gradients of what a segment was given, and of its weights."""
    BACKWARD_INPUTS = "I"
    """The gradients of what a segment was given; what those of its weights need is kept."""
    BACKWARD_WEIGHTS = "W"
    """The gradients of a segment's weights, after those of what it was given."""
    OUT = "out"
    """What a segment keeps for its backward leaves for host memory."""
    IN = "in"
    """It comes back."""
    KEEP = "keep"
    """Keep what enters a span, which the backward runs again as a whole."""
    RESUME = "resume"
    """Take what was kept of a span: what follows runs it again."""
    MOVE = "move"
    """An edge inside the stage takes its value along."""
    MOVE_BACK = "move-back"
    """It takes the gradient of the value back."""
    FETCH = "fetch"
    """The weights of a bucket come to where they are read, and stay for the step."""
    GATHER = "gather"
    """The weights of a window come to where they are read."""
    RELEASE = "release"
    """The weights of a window are dropped where they were gathered."""
    REDUCE = "reduce"
    """The gradients of a window's or a bucket's weights go to where these are stored."""
    LOSS = "loss"
    """The losses of all microbatches are added up, and every device gets the sum."""
    UPDATE = "update"
    """The optimizer makes the next version of a stage's weights, where they are stored."""


GOES_BACK = frozenset({Verb.BACKWARD, Verb.BACKWARD_INPUTS})
"""What makes gradients of what a segment was given."""

COMPUTING = frozenset({Verb.FORWARD, Verb.COMPUTE, Verb.RERUN, *GOES_BACK, Verb.BACKWARD_WEIGHTS})
"""What runs a segment, which one device does by itself."""

SWAPS = frozenset({Verb.OUT, Verb.IN})
"""Copies between a device and its host, which wait for no other communication."""

OF_MICROBATCH = frozenset({*SWAPS, Verb.MOVE, Verb.MOVE_BACK})
"""What moves something of one microbatch; all other communication is of weights."""


class Phase(StrEnum):
    """Which part of a communication an instruction is; its value is how texts write it."""

    WHOLE = ""
    """It starts, and devices wait until it is done."""
    START = "start"
    """It starts, and devices go on while it is under way."""
    WAIT = "wait"
    """Devices wait until what they started is done."""


_CARRY = re.compile(r"(carry|carry-back) (\S+) ([0-9]{1,9})")
_TEXT = re.compile(
    rf"(?:(start|wait) )?({'|'.join(Verb)}) (\S+) on ([0-9]+(?:,[0-9]+)*)"
    r"(?: at ([0-9]{1,9}))?(?: v([0-9]{1,9}))?(?: keeps ([1-9][0-9]{0,8}))?"
)


@dataclass(frozen=True, slots=True)
class StepInstruction:
    """What devices do together, or one device by itself.

    Law (tests/superscaler_core/program/test_step_program.py): ``parse`` reads what ``str`` writes.

    Attributes:
        kind: what is done.
        name: of the segment, edge, window, bucket or span that it is done with, or of the stage
            whose weights are updated. Every device has segments of its own, which have the same
            names.
        devices: that take part, ascending.
        phase: of communication: all of it, its start, or the wait for its end.
        microbatch: the only one for which a stage's block does it; None for all of them.
        version: of the stage's weights: which one a segment reads, or which one an update makes.
            Version 0 is there when the step begins.
        keeps: how many versions are there after an update, the new one included.
        what: the segment, edge, window or bucket itself, or the parameters that are updated; None
            if the instruction was read from a text.
    """

    kind: Verb
    name: str
    devices: tuple[Device, ...]
    phase: Phase = Phase.WHOLE
    microbatch: int | None = None
    version: int = 0
    keeps: int = 1
    what: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        words = [self.phase, self.kind, self.name, "on", ",".join(map(str, self.devices))]
        if self.microbatch is not None:
            words += ["at", str(self.microbatch)]
        words += [f"v{self.version}"] if self.version else []
        words += ["keeps", str(self.keeps)] if self.keeps > 1 else []
        return " ".join(word for word in words if word)

    def is_for(self, microbatch: int) -> bool:
        """Whether a stage's block does it for a microbatch."""
        return self.microbatch is None or self.microbatch == microbatch

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
        phase = Phase(found[1] or "")
        devices = tuple(map(int, found[4].split(",")))
        microbatch = None if found[5] is None else int(found[5])
        versions = int(found[6] or 0), int(found[7] or 1)
        return cls(Verb(found[2]), found[3], devices, phase, microbatch, *versions)


def weights_of(stage: int) -> str:
    """The name of a stage's weights, as updates have it."""
    return f"stage{stage}"


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
