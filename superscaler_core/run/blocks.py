"""Blocks: what one device does in a block of the step program, and for an event of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from superscaler_core.materialize.materialized import Materialized
from superscaler_core.plan import Device
from superscaler_core.program.event import Event, OverlappedPair, P2PSend, pair_of
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.run.calls import Calls
from superscaler_core.run.lines import BlockFunction, CallExpression, Line
from superscaler_core.schedules import ActionKind

AROUND = (0,)
"""For what is before all stages or after them, and uses no values of a stage."""


def lines_of(
    made: Materialized, device: Device, stages: Sequence[int], block: Iterable[StepInstruction]
) -> Iterator[tuple[StepInstruction, int, Sequence[Line]]]:
    """The instructions of a device in a block, each with the number of its run, and its lines.

    Args:
        made: the plan with its step program.
        device: the device.
        stages: the stage of each half of a microbatch, or of each action of a pair.
        block: the instructions.
    """
    calls = [Calls(made, device, stage) for stage in stages]
    for i in block:
        if device in i.devices:
            number = i.half or 0
            yield i, number, tuple(calls[number].lines(i))


def stages_of(made: Materialized, function: BlockFunction) -> Sequence[int]:
    """The stage of each half of a microbatch, or of each action of a pair."""
    stages = [stage for stage, _ in function.runs]
    return stages if len(stages) > 1 else stages * made.step_program.num_halves


def block_of(made: Materialized, function: BlockFunction) -> Sequence[StepInstruction]:
    """The instructions of all devices in a block."""
    program, runs = made.step_program, function.runs
    return program.blocks[runs[0]] if len(runs) == 1 else program.pairs[runs[0], runs[1]]


def event_call(made: Materialized, event: Event, device: Device) -> CallExpression:
    """What a device does for an event: a transfer, or a block with the weights that it reads."""
    match event:
        case P2PSend():
            return CallExpression(
                "p2p_send_back" if event.is_back else "p2p_send", (event.name, event.microbatch)
            )
        case OverlappedPair(first, second):
            return CallExpression(
                BlockFunction(pair_of(event)), (first.microbatch, second.microbatch)
            )
    block = BlockFunction(((event.stage, event.kind),))
    mb = event.microbatch * made.step_program.num_halves
    if event.kind is ActionKind.UPDATE:
        return CallExpression(block)
    if event.kind is ActionKind.RECYCLE:
        return CallExpression(
            "without_grad", (block, mb), (("recycling_pass", event.recycling_pass),)
        )
    version = made.step_program.versions.get(event, 0)
    borrowed = {
        use.name: made.borrowed[event, use.owner]
        for use in made.borrowers.get(event.stage, ())
        if use.owner is not None and device in use.sharding.shards
    }
    is_back = event.kind is not ActionKind.FORWARD
    if not (version or any(borrowed.values()) or (is_back and made.has_one_version)):
        return CallExpression(block, (mb,))
    options = (("version", version), *((("borrowed", borrowed),) if borrowed else ()))
    return CallExpression("reads_back" if is_back else "reads", (block, mb), options)
