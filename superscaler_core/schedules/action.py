"""Action: one run of one stage for one microbatch, the unit of a schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from superscaler_core.schedules.errors import ScheduleError


class ActionKind(StrEnum):
    """What a stage does with a microbatch; the value of a member is its spelling in texts.

    A microbatch has one ``F`` at every stage, and after it either one ``B``, or one ``I`` and one
    ``W``, which are the two halves of a ``B``. Between forward and backward, it may have one ``R``.
    Before its ``F``, it may have any number of ``f``.
    """

    FORWARD = "F"
    """The forward of training."""
    BACKWARD = "B"
    """The whole backward: gradients of the stage's inputs and of its weights."""
    INPUTS = "I"
    """The gradients of the stage's inputs; earlier stages wait for these."""
    WEIGHTS = "W"
    """The gradients of the stage's weights; needed only at the end of the step."""
    RECOMPUTE = "R"
    """Recompute, before the backward, the values that it needs and the forward did not keep."""
    RECYCLE = "f"
    """A forward that keeps nothing, for a microbatch that is recycled."""
    UPDATE = "U"
    """Update the stage's weights with the gradients of all microbatches since the last update. The
    action is named after the last of these microbatches. If a schedule has no updates, weights are
    updated after it."""

    @property
    def goes_back(self) -> bool:
        """Whether the action receives gradients from stages and sends gradients to stages."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUTS)


KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUTS: "backward for inputs",
    ActionKind.WEIGHTS: "backward for weights",
    ActionKind.RECOMPUTE: "recomputation",
    ActionKind.RECYCLE: "forward without gradient",
    ActionKind.UPDATE: "update",
}
"""Kinds of actions, with their names in messages."""

# At most nine digits: a schedule lists all its actions, so larger numbers are mistakes.
_TEXT = re.compile(rf"([0-9]{{1,9}})([{''.join(KINDS)}])([0-9]{{1,9}})(?:\.([0-9]{{1,9}}))?")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One step of a worker's work: ``1F3`` means that stage 1 runs microbatch 3 forward.

    Stages, microbatches and passes count from 0. ``recycling_pass`` numbers the forwards without
    gradient of one microbatch (recycling runs several before the forward of training): ``1f3`` is
    the first, ``1f3.1`` the second.

    Law (tests/superscaler_core/schedules/test_schedules.py): ``Action.parse(str(a)) == a``.

    >>> Action.parse("1F3")
    Action(kind=<ActionKind.FORWARD: 'F'>, stage=1, microbatch=3, recycling_pass=0)

    Raises:
        ScheduleError: an unknown kind, a negative number, or a pass for a kind other than f.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    recycling_pass: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"no kind of action is called {self.kind!r}; {_KINDS_TEXT}.")
        object.__setattr__(self, "kind", ActionKind(self.kind))
        if min(self.stage, self.microbatch, self.recycling_pass) < 0:
            raise ScheduleError(
                f"stage, microbatch and recycling pass count from 0, got stage={self.stage}, "
                f"microbatch={self.microbatch}, recycling_pass={self.recycling_pass}."
            )
        if self.recycling_pass and self.kind is not ActionKind.RECYCLE:
            raise ScheduleError(
                f"{self.kind} has a pass {self.recycling_pass}, but only f is run in passes."
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.brief}"

    @property
    def brief(self) -> str:
        """The text without the stage: ``F3``."""
        return f"{self.kind}{self.microbatch}" + (
            f".{self.recycling_pass}" if self.recycling_pass else ""
        )

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
        stage, kind, microbatch, number = found.groups()
        return cls(ActionKind(kind), int(stage), int(microbatch), int(number or 0))


_KINDS_TEXT = "kinds are " + ", ".join(f"{kind} ({name})" for kind, name in KINDS.items())
