"""StageWriter: the functions of one stage on one device, and of pairs of runs, as Python text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from superscaler_core.codegen.line_writer import LineWriter, block_name
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import Functions, SegmentWriter
from superscaler_core.codegen.statement import Statement, freed
from superscaler_core.codegen.text import INDENT, function
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import Verb
from superscaler_core.run.blocks import block_of, lines_of, stages_of
from superscaler_core.run.lines import BlockFunction
from superscaler_core.schedules import ActionKind


class StageWriter:
    """Writes the functions of one device in one stage; ``names`` are those of the device's file."""

    def __init__(self, made: Materialized, stage: int, device: Device, names: Names) -> None:
        self._made, self._stage, self._device, self._names = made, stage, device, names
        flow = made.stages[stage].flow(device)
        for half in range(made.step_program.num_halves):
            LineWriter(made, names.of_half(half)).add(flow)
        # Both halves run the same segments, whose functions are written once.
        self._segments = SegmentWriter(made, flow, LineWriter(made, names))
        self._all = flow.segments

    def segment_functions(self, known: Functions) -> list[str]:
        """The functions of the segments; those that are known already are not written again."""
        return [text for segment in self._all for text in known.of(self._segments, segment)]

    def stage_functions(self) -> list[str]:
        """One function for each run of the stage in the schedule."""
        order = self._made.stages[self._stage].order
        runs = [run for run in order if run not in (ActionKind.RECYCLE, ActionKind.FORWARD)]
        blocks = [BlockFunction(((self._stage, run),)) for run in (ActionKind.FORWARD, *runs)]
        return [block_function(self._made, self._device, self._names, block) for block in blocks]


def pair_functions(made: Materialized, device: Device, names: Names) -> Iterator[str]:
    """The functions of a device's pairs, one for each two runs of stages that are woven."""
    for pair in made.step_program.pairs:
        if any(device in made.devices_of(stage, run) for stage, run in pair):
            yield block_function(made, device, names, BlockFunction(pair))


def update_functions(made: Materialized, device: Device) -> Iterator[str]:
    """The functions that update a stage's weights between microbatches."""
    for (stage, run), block in made.step_program.blocks.items():
        if run is ActionKind.UPDATE and any(device in i.devices for i in block):
            yield block_function(made, device, Names(), BlockFunction(((stage, run),)))


def block_function(made: Materialized, device: Device, names: Names, block: BlockFunction) -> str:
    """The function of a block on a device; ``names`` are those of the device's file."""
    is_pair = len(block.runs) > 1
    args = ("mb", "other") if is_pair else () if block.runs[0][1] is ActionKind.UPDATE else ("mb",)
    # Halves of a microbatch have names of their own; the second half follows the first.
    writers = [
        LineWriter(made, names.of_half(0 if is_pair else number), mb)
        for number, mb in enumerate(args if is_pair else ("mb", "mb + 1"))
    ]
    body: list[Statement] = []
    for i, number, lines in lines_of(made, device, stages_of(made, block), _printed(made, block)):
        statements = [writers[number].statement(line) for line in lines]
        if i.microbatch is not None:
            first = i.microbatch * made.step_program.num_halves
            condition = f"{args[number if is_pair else 0]} == {first}"
            inner = [replace(each, text=INDENT + each.text) for each in statements]
            statements = [Statement(f"if {condition}:"), *inner]
        body += statements
    return function(f"def {block_name(block)}({', '.join(['run', *args])}):", freed(body))


def _printed(made: Materialized, block: BlockFunction) -> Sequence[StepInstruction]:
    """The instructions of a block's function.

    Recycling passes call the function of the forward, so that one also sends what its stage
    recycles; ``Rank.recycle`` does nothing in the last pass.
    """
    mine, (stage, run) = block_of(made, block), block.runs[0]
    leaving, num_halves = made.stages[stage].leaving, made.step_program.num_halves
    is_forward = len(block.runs) == 1 and run is ActionKind.FORWARD
    if not is_forward or not any(edge.recycles for edge in leaving):
        return mine
    halves = range(num_halves) if num_halves > 1 else (None,)
    sends = (
        StepInstruction(Verb.SEND, edge.name, tuple(edge.src.shards), half=half)
        for half in halves
        for edge in leaving
    )
    return (*(i for i in mine if i.kind is not Verb.SEND), *sends)
