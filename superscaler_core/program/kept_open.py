"""Kept open: the last FSDP unit of a forward stays unsharded for the backward right after it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from superscaler_core.plan import Device
from superscaler_core.program.event import actions_in
from superscaler_core.program.instruction import Block
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.verb import BETWEEN, Verb
from superscaler_core.schedules import Action, ActionKind


def kept_open(program: StepProgram) -> StepProgram:
    """A program in which no backward gathers what its forward has released right before."""
    devices: dict[int, set[Device]] = defaultdict(set)
    for (stage, _), block in program.blocks.items():
        devices[stage].update(device for i in block for device in i.devices)
    runs = [run for event in program.events for run in actions_in(event)]
    blocks = dict(program.blocks)
    for stage, here in devices.items():
        back = _returns_at_once(stage, [r for r in runs if not here.isdisjoint(devices[r.stage])])
        if back is not None:
            keys = (stage, ActionKind.FORWARD), (stage, back)
            blocks |= zip(keys, _joined(*(blocks[key] for key in keys)), strict=True)
    return replace(program, blocks=blocks)


def _returns_at_once(stage: int, runs: list[Action]) -> ActionKind | None:
    """The kind of a stage's backwards (B or I) if each comes right after its forward.

    Args:
        stage: the stage.
        runs: what runs on its devices, in order.
    """
    back = [(a, b) for a, b in pairwise(runs) if b.stage == stage and b.kind.goes_back]
    kinds = {b.kind for _, b in back}
    is_paired = all(a == replace(b, kind=ActionKind.FORWARD) for a, b in back)
    return kinds.pop() if is_paired and len(kinds) == 1 else None


def _joined(forward: Block, backward: Block) -> tuple[Block, Block]:
    """Both blocks, without a release at the end and the gather of the same weights at the begin."""
    ends = [n for n, i in enumerate(forward) if i.kind not in BETWEEN][-1:]
    begins = [n for n, i in enumerate(backward) if i.kind not in BETWEEN][:1]
    for end, begin in zip(ends, begins, strict=False):
        last, first = forward[end], backward[begin]
        is_pair = (last.kind, first.kind) == (Verb.RESHARD, Verb.UNSHARD)
        if is_pair and (last.name, last.devices) == (first.name, first.devices):
            return forward[:end] + forward[end + 1 :], backward[:begin] + backward[begin + 1 :]
    return forward, backward
