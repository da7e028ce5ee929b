"""Instruction: one thing that devices do; a step program consists of instructions.

Inside a stage it is a ``StepInstruction``; between stages it is the ``Carry`` of a tensor. An
``Action`` of the schedule, which runs a stage for a microbatch, runs all instructions of the stage.
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
    """What an instruction does; the value of a member is its spelling in texts."""

    FORWARD = "F"
    """Run a segment, and keep what its backward needs."""
    COMPUTE = "f"
    """Run a segment, and keep nothing."""
    HOLD = "hold"
    """Keep only the inputs of a segment, because its backward recomputes it."""
    RERUN = "R"
    """Recompute, before its backward, a segment that kept only its inputs."""
    BACKWARD = "B"
    """Compute the gradients of a segment's inputs and of its weights."""
    BACKWARD_INPUTS = "I"
    """Compute the gradients of a segment's inputs; keep what the gradients of its weights need."""
    BACKWARD_WEIGHTS = "W"
    """Compute the gradients of a segment's weights, after those of its inputs."""
    OUT = "out"
    """Copy what a segment keeps for its backward to host memory."""
    IN = "in"
    """Copy it back to the device."""
    KEEP = "keep"
    """Keep the inputs of a span, which is rerun as a whole before its backward."""
    RESUME = "resume"
    """Take the kept inputs of a span; the instructions after this rerun it."""
    MOVE = "move"
    """Move the value of an edge inside the stage."""
    MOVE_BACK = "move-back"
    """Move the gradient of that value back."""
    FETCH = "fetch"
    """Fetch the weights of a bucket to where they are read; they stay for the step."""
    GATHER = "gather"
    """Gather the weights of a window where they are read."""
    RELEASE = "release"
    """Drop the gathered weights of a window."""
    REDUCE = "reduce"
    """Reduce the gradients of a window's or bucket's weights to where the weights are stored."""
    LOSS = "loss"
    """Sum the losses of all microbatches; every device gets the sum."""
    UPDATE = "update"
    """Let the optimizer make the next version of a stage's weights, where they are stored."""


GOES_BACK = frozenset({Verb.BACKWARD, Verb.BACKWARD_INPUTS})
"""Kinds that compute gradients of a segment's inputs."""

COMPUTING = frozenset({Verb.FORWARD, Verb.COMPUTE, Verb.RERUN, *GOES_BACK, Verb.BACKWARD_WEIGHTS})
"""Kinds that run a segment; each is done by one device alone."""

SWAPS = frozenset({Verb.OUT, Verb.IN})
"""Copies between a device and its host; they wait for no other communication."""

MOVES = frozenset({Verb.MOVE, Verb.MOVE_BACK})
"""Communication inside a stage, of a microbatch's values and gradients."""

OF_MICROBATCH = SWAPS | MOVES
"""Communication that belongs to one microbatch; all other communication is of weights."""

OF_WEIGHTS = frozenset({Verb.FETCH, Verb.GATHER, Verb.RELEASE, Verb.REDUCE})
"""Communication of weights in a stage's block, done once for both halves of a microbatch."""


class Phase(StrEnum):
    """Which part of a communication an instruction is; the value is its spelling in texts."""

    WHOLE = ""
    """Start it, and wait until it is done."""
    START = "start"
    """Start it in the background."""
    WAIT = "wait"
    """Wait until the started communication is done."""


_CARRY = re.compile(r"(carry|carry-back) (\S+) ([0-9]{1,9})")
_TEXT = re.compile(
    rf"(?:(start|wait) )?({'|'.join(Verb)}) (\S+) on ([0-9]+(?:,[0-9]+)*)"
    r"(?: half ([01]))?(?: at ([0-9]{1,9}))?(?: v([0-9]{1,9}))?(?: keeps ([1-9][0-9]{0,8}))?"
)


@dataclass(frozen=True, slots=True)
class StepInstruction:
    """One thing that a group of devices does together, or that one device does alone.

    Law (tests/superscaler_core/program/test_step_program.py): ``parse`` reads what ``str`` writes.

    Attributes:
        kind: what is done.
        name: name of the segment, edge, window, bucket or span, or of the stage whose weights are
            updated. Devices have their own segments, which share names.
        devices: devices that take part, ascending.
        phase: the whole communication, its start, or the wait for its end.
        half: the half of the microbatch for which this is done, 0 or 1, if microbatches run in
            halves (``program.duplex``); None if it is done once for the whole microbatch. In a
            pair (``program.pairs``) the action for which it is done.
        microbatch: the only microbatch for which a stage's block does this; None for all.
        version: version of the stage's weights that a segment reads or an update makes. Version 0
            exists when the step begins.
        keeps: number of versions that exist after an update, including the new one.
        what: the segment, edge, window or bucket itself, or the updated parameters; None if the
            instruction was read from a text.
    """

    kind: Verb
    name: str
    devices: tuple[Device, ...]
    phase: Phase = Phase.WHOLE
    microbatch: int | None = None
    version: int = 0
    keeps: int = 1
    half: int | None = None
    what: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        words = [self.phase, self.kind, self.name, "on", ",".join(map(str, self.devices))]
        words += [] if self.half is None else ["half", str(self.half)]
        if self.microbatch is not None:
            words += ["at", str(self.microbatch)]
        words += [f"v{self.version}"] if self.version else []
        words += ["keeps", str(self.keeps)] if self.keeps > 1 else []
        return " ".join(word for word in words if word)

    def is_for(self, microbatch: int) -> bool:
        """Whether a stage's block does this for a microbatch."""
        return self.microbatch is None or self.microbatch == microbatch

    @classmethod
    def parse(cls, text: str) -> StepInstruction:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: the text has another form.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"cannot read the instruction {text.strip()[:80]!r}: it is a kind, a name and the "
                f"devices, such as 'F stage0_segment1 on 0'; kinds are {', '.join(Verb)}."
            )
        phase = Phase(found[1] or "")
        devices = tuple(map(int, found[4].split(",")))
        half, microbatch = (None if text is None else int(text) for text in found.group(5, 6))
        versions = int(found[7] or 0), int(found[8] or 1)
        return cls(Verb(found[2]), found[3], devices, phase, microbatch, *versions, half)


def weights_of(stage: int) -> str:
    """The name of a stage's weights in updates."""
    return f"stage{stage}"


@dataclass(frozen=True, slots=True)
class Carry:
    """The transfer of a microbatch's tensor, or its gradient, over an edge between stages or turns.

    Attributes:
        name: name of the edge.
        microbatch: the microbatch.
        is_back: whether this is the gradient.
        edge: the edge itself; None if the event was read from a text.
    """

    name: str
    microbatch: int
    is_back: bool
    edge: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{'carry-back' if self.is_back else 'carry'} {self.name} {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Woven:
    """Two actions of one worker that run as one, such as ``0F3&1B2``."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"{self.first}&{self.second}"


Event = Action | Woven | Carry
"""A run of a stage for a microbatch, two such runs as one, or a transfer between stages."""


def actions_in(event: Event) -> tuple[Action, ...]:
    """The actions of an event: one, two, or none."""
    match event:
        case Woven(first, second):
            return first, second
        case Carry():
            return ()
    return (event,)


def parse_event(text: str) -> Event:
    """Read the text of an event, as ``str`` writes it.

    Raises:
        PlanError: the text has another form.
    """
    carried = _CARRY.fullmatch(text)
    if carried is not None:
        return Carry(carried[2], int(carried[3]), carried[1] == "carry-back")
    try:
        actions = [Action.parse(word) for word in text.split("&")]
        return Woven(*actions) if len(actions) == 2 else Action.parse(text)
    except ScheduleError as error:
        raise PlanError(str(error)) from None
