"""Kept open: a rewrite that keeps the last window of a forward for the backward right after it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from superscaler_core.program.instruction import Block
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.verb import BETWEEN, Verb
from superscaler_core.schedules import Action, ActionKind


def kept_open(program: StepProgram) -> StepProgram:
    """A program in which no backward gathers what its forward has released right before."""
    blocks = dict(program.blocks)
    for stage in {stage for stage, _ in blocks}:
        back = _returns_at_once(program, stage)
        if back is not None:
            keys = (stage, ActionKind.FORWARD), (stage, back)
            blocks |= zip(keys, _joined(*(blocks[key] for key in keys)), strict=True)
    return replace(program, blocks=blocks)


def _returns_at_once(program: StepProgram, stage: int) -> ActionKind | None:
    """The kind of a stage's backwards (B or I) if each comes right after its forward."""
    actions = [event for event in program.events if isinstance(event, Action)]
    mine = [action for action in actions if action.stage == stage]
    kinds = {action.kind for action in mine if action.kind.goes_back}
    pairs = [(a, b) for a, b in pairwise(mine) if b.kind.goes_back]
    is_paired = all(a.kind is ActionKind.FORWARD and a.microbatch == b.microbatch for a, b in pairs)
    # Other stages on the same devices may run between the two.
    return kinds.pop() if is_paired and len(kinds) == 1 and len(mine) == len(actions) else None


def _joined(forward: Block, backward: Block) -> tuple[Block, Block]:
    """Both blocks, without a release at the end and the gather of the same weights at the begin."""
    ends = [n for n, i in enumerate(forward) if i.kind not in BETWEEN][-1:]
    begins = [n for n, i in enumerate(backward) if i.kind not in BETWEEN][:1]
    for end, begin in zip(ends, begins, strict=False):
        last, first = forward[end], backward[begin]
        is_pair = (last.kind, first.kind) == (Verb.RELEASE, Verb.GATHER)
        if is_pair and (last.name, last.devices) == (first.name, first.devices):
            return forward[:end] + forward[end + 1 :], backward[:begin] + backward[begin + 1 :]
    return forward, backward
