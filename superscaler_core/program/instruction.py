"""Instruction: one thing that devices do in a stage, the atom of a step program."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.program.side import Device


class Kind(StrEnum):
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


COMPUTING = frozenset({Kind.FORWARD, Kind.COMPUTE, Kind.HOLD, Kind.BACKWARD})
"""Kinds of what one device does with a segment."""

_TEXT = re.compile(rf"({'|'.join(Kind)}) (\S+) on ([0-9]+(?:,[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """What devices do together, or one device by itself.

    Law (tests/superscaler_core/test_step_program.py): ``Instruction.parse(str(i)) == i``.

    Attributes:
        kind: what is done.
        name: of the segment, edge, window or span that it is done with. Every device has segments
            of its own, which have the same names.
        devices: that take part, ascending.
        what: the segment, edge or window itself; None if the instruction was read from a text.
    """

    kind: Kind
    name: str
    devices: tuple[Device, ...]
    what: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name} on {','.join(map(str, self.devices))}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Read the text that ``str`` writes.

        Raises:
            PlanError: it has another form.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"cannot read the instruction {text.strip()[:80]!r}: it is a kind, a name and the "
                f"devices, such as 'F stage0_segment1 on 0'; kinds are {', '.join(Kind)}."
            )
        return cls(Kind(found[1]), found[2], tuple(map(int, found[3].split(","))))
