"""Action: one stage at work on one microbatch, the atom of a schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from superscaler_core.schedules.errors import ScheduleError


class ActionKind(StrEnum):
    """What a stage does with a microbatch; the value is how texts write it.

    A microbatch has one ``F`` at every stage, and after it one ``B``, or one ``I`` and one ``W``,
    which are the two halves of a ``B``. It may have one ``R`` between these, and any number of
    ``f`` before all of them.
    """

    FORWARD = "F"
    """The forward that is trained."""
    BACKWARD = "B"
    """The whole backward: gradients of what the stage reads, and of its weights."""
    INPUTS = "I"
    """The gradients of what the stage reads, for which the stages before it wait."""
    WEIGHTS = "W"
    """The gradients of the stage's weights, for which nobody waits before the step's end."""
    RECOMPUTE = "R"
    """What the backward needs and the forward has not kept is computed again, ahead of it."""
    TURN = "f"
    """A forward of which nothing is kept: its microbatch is recycled."""

    @property
    def goes_back(self) -> bool:
        """Whether gradients of other stages are read, and such for other stages are made."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUTS)


KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUTS: "backward for inputs",
    ActionKind.WEIGHTS: "backward for weights",
    ActionKind.RECOMPUTE: "recomputation",
    ActionKind.TURN: "forward without gradient",
}
"""Kinds of action, and what people call them."""

# Nine digits: a schedule is a list of its actions, so larger numbers are mistakes.
_TEXT = re.compile(rf"([0-9]{{1,9}})([{''.join(KINDS)}])([0-9]{{1,9}})(?:\.([0-9]{{1,9}}))?")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """What a worker does in one go: stage 1 runs microbatch 3 forward, ``1F3``.

    Stages, microbatches and turns count from 0. ``turn`` tells apart the forwards without
    gradient of one microbatch (recycling runs several before the one that counts): ``1f3`` is
    the first, ``1f3.1`` the second.

    Law (tests/superscaler_core/schedules/test_schedules.py): ``Action.parse(str(a)) == a``.

    >>> Action.parse("1F3")
    Action(kind=<ActionKind.FORWARD: 'F'>, stage=1, microbatch=3, turn=0)

    Raises:
        ScheduleError: an unknown kind, a negative number, or a turn of another kind than f.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    turn: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"no kind of action is called {self.kind!r}; {_KINDS_TEXT}.")
        object.__setattr__(self, "kind", ActionKind(self.kind))
        if min(self.stage, self.microbatch, self.turn) < 0:
            raise ScheduleError(
                f"stage, microbatch and turn count from 0, got stage={self.stage}, "
                f"microbatch={self.microbatch}, turn={self.turn}."
            )
        if self.turn and self.kind is not ActionKind.TURN:
            raise ScheduleError(f"{self.kind} has a turn {self.turn}, but only f is run in turns.")

    def __str__(self) -> str:
        return f"{self.stage}{self.brief}"

    @property
    def brief(self) -> str:
        """Text without the stage, for where that is known: ``F3``."""
        return f"{self.kind}{self.microbatch}" + (f".{self.turn}" if self.turn else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text that ``str`` writes.

        Raises:
            ScheduleError: the text has another form.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ScheduleError(
                f"cannot parse action {text[:40]!r}: expected stage, kind and microbatch, "
                f"such as '1F3'; {_KINDS_TEXT}."
            )
        stage, kind, microbatch, turn = found.groups()
        return cls(ActionKind(kind), int(stage), int(microbatch), int(turn or 0))


_KINDS_TEXT = "kinds are " + ", ".join(f"{kind} ({name})" for kind, name in KINDS.items())
