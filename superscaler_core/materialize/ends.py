"""Ends: what stages take from other stages, and leave for them, as instructions of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.operands import (
    FORWARDS,
    Operands,
    arriving_grads,
    instruction_of,
    sent,
    sent_grads,
)
from superscaler_core.plan import Device
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.verb import Verb
from superscaler_core.schedules import ActionKind

if TYPE_CHECKING:
    from superscaler_core.materialize.stage_program import StageProgram
    from superscaler_core.program.step_program import StepProgram

    _Maker = Callable[[StageProgram, Edge, tuple[Device, ...]], StepInstruction | None]


def with_ends(program: StepProgram, stages: Sequence[StageProgram]) -> StepProgram:
    """A program whose blocks begin with what they take, and end with what they leave.

    Args:
        program: a program whose blocks have neither yet.
        stages: the stages, as ordinary stages and copies on other routes.
    """
    ends = {
        (s, kind): (taken(stages[s], kind), left(stages[s], kind)) for s, kind in program.blocks
    }
    halves = (None,) if program.num_halves == 1 else range(program.num_halves)
    blocks, pairs = {}, {}
    for key, block in program.blocks.items():
        begin, end = ([replace(i, half=h) for h in halves for i in side] for side in ends[key])
        blocks[key] = (*begin, *block, *end)
    for pair, block in program.pairs.items():
        begin, end = (
            [replace(i, half=h) for h, key in enumerate(pair) for i in ends[key][side]]
            for side in (0, 1)
        )
        pairs[pair] = (*begin, *block, *end)
    return replace(program, blocks=blocks, pairs=pairs)


def taken(stage: StageProgram, kind: ActionKind) -> Block:
    """What a run of a stage takes from other stages."""
    if kind in FORWARDS:
        return tuple(_each(stage, stage.arriving, False, _received))
    return tuple(_each(stage, stage.leaving, True, _received_back) if kind.goes_back else ())


def left(stage: StageProgram, kind: ActionKind) -> Block:
    """What a run of a stage leaves for other stages."""
    if kind in FORWARDS:
        leaving = [edge for edge in stage.leaving if _leaves(edge, kind)]
        return tuple(_each(stage, leaving, True, _sent))
    return tuple(_each(stage, stage.arriving, False, _sent_back) if kind.goes_back else ())


def _leaves(edge: Edge, kind: ActionKind) -> bool:
    """Whether a run of its stage sends the value of an edge."""
    if edge.recycles is not None:
        return kind is ActionKind.RECYCLE
    return kind is ActionKind.FORWARD or not edge.result


def _each(
    stage: StageProgram, edges: Sequence[Edge], is_src: bool, make: _Maker
) -> Iterator[StepInstruction]:
    """One instruction for every edge, of the devices that write it, or of those that read it."""
    for edge in edges:
        there = (edge.src if is_src else edge.dst).shards
        devices = tuple(sorted(device for device in there if device in stage.steps))
        made = make(stage, edge, devices) if devices else None
        if made is not None:
            yield made


def _received(_: StageProgram, edge: Edge, devices: tuple[Device, ...]) -> StepInstruction:
    verb = Verb.RECEIVE if edge.recycles is None else Verb.RECYCLED
    return instruction_of(verb, edge.name, devices, Operands())


def _sent(stage: StageProgram, edge: Edge, devices: tuple[Device, ...]) -> StepInstruction:
    return instruction_of(Verb.SEND, edge.name, devices, Operands(sent(edge, stage.flows(devices))))


def _received_back(
    stage: StageProgram, edge: Edge, devices: tuple[Device, ...]
) -> StepInstruction | None:
    given = Operands((), sent_grads(edge, stage.flows(devices)))
    return instruction_of(Verb.RECEIVE_BACK, edge.name, devices, given) if edge.backward else None


def _sent_back(
    stage: StageProgram, edge: Edge, devices: tuple[Device, ...]
) -> StepInstruction | None:
    given = Operands(arriving_grads(edge, stage.flows(devices)))
    return instruction_of(Verb.SEND_BACK, edge.name, devices, given) if edge.backward else None
