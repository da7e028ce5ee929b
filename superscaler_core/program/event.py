"""Event: a run of a stage for a microbatch, or a transfer between stages.

An ``Action`` of the schedule, which runs a stage for a microbatch, runs all instructions of the
stage's block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from superscaler_core.errors import PlanError
from superscaler_core.schedules import Action, ActionKind, ScheduleError

_P2P = re.compile(r"(p2p|p2p-back) (\S+) ([0-9]{1,9})")


def weights_of(stage: int) -> str:
    """The name of a stage's weights in updates."""
    return f"stage{stage}"


def stage_of_weights(name: str) -> int:
    """The stage whose weights have this name in updates."""
    return int(name.removeprefix("stage"))


@dataclass(frozen=True, slots=True)
class P2PSend:
    """The transfer of a microbatch's tensor, or its gradient, over an edge between stages or
    passes.

    Attributes:
        name: name of the edge.
        microbatch: the microbatch.
        is_back: whether this is the gradient.
    """

    name: str
    microbatch: int
    is_back: bool

    def __str__(self) -> str:
        return f"{'p2p-back' if self.is_back else 'p2p'} {self.name} {self.microbatch}"


@dataclass(frozen=True, slots=True)
class OverlappedPair:
    """Two actions of one worker that run as one, such as ``0F3&1B2``."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"{self.first}&{self.second}"


Pair = tuple[tuple[int, ActionKind], tuple[int, ActionKind]]
"""The stages and kinds of two actions that run as one."""


def pair_text(pair: Pair) -> str:
    """The title of the block of such pairs, such as ``pair 0F&1B``."""
    (stage, kind), (other_stage, other_kind) = pair
    return f"pair {stage}{kind}&{other_stage}{other_kind}"


def pair_of(event: OverlappedPair) -> Pair:
    """The stages and kinds of a pair's actions."""
    first, second = event.first, event.second
    return (first.stage, first.kind), (second.stage, second.kind)


Event = Action | OverlappedPair | P2PSend
"""A run of a stage for a microbatch, two such runs as one, or a transfer between stages."""


def actions_in(event: Event) -> tuple[Action, ...]:
    """The actions of an event: one, two, or none."""
    match event:
        case OverlappedPair(first, second):
            return first, second
        case P2PSend():
            return ()
    return (event,)


def parse_event(text: str) -> Event:
    """Read the text of an event, as ``str`` writes it.

    Raises:
        PlanError: the text has another form.
    """
    sent = _P2P.fullmatch(text)
    if sent is not None:
        return P2PSend(sent[2], int(sent[3]), sent[1] == "p2p-back")
    try:
        actions = [Action.parse(word) for word in text.split("&")]
        return OverlappedPair(*actions) if len(actions) == 2 else Action.parse(text)
    except ScheduleError as error:
        raise PlanError(str(error)) from None
