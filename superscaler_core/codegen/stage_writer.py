"""StageWriter: the functions of one stage on one device, as Python text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from superscaler_core.codegen.names import Names
from superscaler_core.codegen.run_writer import RunWriter, prefix_of
from superscaler_core.codegen.segment_writer import Functions, SegmentWriter
from superscaler_core.codegen.statement import Statement, freed
from superscaler_core.codegen.text import INDENT, function
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.verb import BETWEEN, OF_WEIGHTS, Verb
from superscaler_core.quoted import quoted
from superscaler_core.schedules import ActionKind

_CALLS = {
    Verb.FETCH: "fetch",
    Verb.GATHER: "gather",
    Verb.RELEASE: "drop",
    Verb.REDUCE: "reduce",
    Verb.LOSS: "total_loss",
    Verb.UPDATE: "update",
}
"""Calls of generated code about weights."""

STAGE_FUNCTIONS = {
    ActionKind.TURN: "forward",
    ActionKind.FORWARD: "forward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUTS: "backward_inputs",
    ActionKind.WEIGHTS: "backward_weights",
    ActionKind.UPDATE: "update",
}
"""The suffix of the function of each run: ``stage0_backward_weights``."""


def _nothing(_: RunWriter) -> list[Statement]:
    return []


_BACK = RunWriter.arriving_back, RunWriter.leaving_back

AROUND = {
    ActionKind.FORWARD: (RunWriter.arriving, RunWriter.leaving),
    ActionKind.BACKWARD: _BACK,
    ActionKind.INPUTS: _BACK,
}
"""The transfers from and to other stages at the begin and at the end of a run."""


def weights_call(made: Materialized, instruction: StepInstruction, device: Device) -> str:
    """The call that fetches, reduces or updates weights, or one phase of that call."""
    names: list[str] = []
    more = ""
    match instruction.kind:
        case Verb.LOSS:
            return f"run.{_CALLS[instruction.kind]}()"
        case Verb.UPDATE if made.is_asynchronous:
            names = [tensor.name for tensor in made.subject(instruction)]
            more = f", keeps={instruction.keeps}"
        case Verb.UPDATE:
            storage = made.weights.storage
            names = [t.name for t in made.subject(instruction) if device in storage[t].shards]
        case _:
            names = [
                use.name
                for use in made.uses_of(instruction)
                if device in use.storage.shards or device in use.side.shards
            ]
    call = f"run.{prefix_of(instruction.phase)}{_CALLS[instruction.kind]}"
    return f"{call}([{', '.join(map(quoted, names))}]{more})"


def only_for(
    instruction: StepInstruction, lines: Sequence[Statement], mb: str, num_halves: int = 1
) -> Iterator[Statement]:
    """The statements of an instruction, which may be for one microbatch only."""
    if instruction.microbatch is None:
        yield from lines
        return
    yield Statement(f"if {mb} == {instruction.microbatch * num_halves}:")
    yield from (replace(line, text=INDENT + line.text) for line in lines)


class StageWriter:
    """Writes the functions of one device in one stage: each instruction becomes statements.

    Args:
        made: the plan.
        stage, device: the stage and the device.
        names: the names of the device's file.
    """

    def __init__(self, made: Materialized, stage: int, device: Device, names: Names) -> None:
        self._made, self._stage, self._device = made, stage, device
        mbs = ("mb", "mb + 1")[: made.plan.overlap.num_halves]
        self._halves = [
            RunWriter(made, stage, device, names.of_half(half), mb) for half, mb in enumerate(mbs)
        ]
        # Both halves run the same segments, whose functions are written once.
        self._flow = self._halves[0].flow
        self._segments = SegmentWriter(made, self._flow, self._halves[0].variables)

    # --- functions of the file ------------------------------------------------------------------

    def segment_functions(self, known: Functions) -> list[str]:
        """The functions of the segments; those that are known already are not written again."""
        return [text for segment in self.segments for text in known.of(self._segments, segment)]

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments of the stage, in order."""
        return self._flow.segments

    def stage_functions(self) -> list[str]:
        """One function for each run of the stage in the schedule."""
        texts = [self._function(ActionKind.FORWARD)]
        for run in self._made.stages[self._stage].order:
            if run not in (ActionKind.TURN, ActionKind.FORWARD):
                texts.append(self._function(run))
        return texts

    def _function(self, run: ActionKind) -> str:
        begin, end = AROUND.get(run, (_nothing, _nothing))
        lines = [line for half in self._halves for line in begin(half)]
        lines += self._body(run)
        lines += [line for half in self._halves for line in end(half)]
        return function(f"def stage{self._stage}_{STAGE_FUNCTIONS[run]}(run, mb):", freed(lines))

    def _body(self, run: ActionKind) -> list[Statement]:
        return [
            line
            for instruction in self._made.step_program.on(self._device, self._stage, run)
            if instruction.kind not in BETWEEN
            for line in only_for(
                instruction, self._statements(instruction, run), "mb", len(self._halves)
            )
        ]

    def _statements(self, instruction: StepInstruction, run: ActionKind) -> list[Statement]:
        """The statements of an instruction in a run of the stage."""
        if instruction.kind in OF_WEIGHTS:
            return [Statement(weights_call(self._made, instruction, self._device))]
        return self._halves[instruction.half or 0].statements(instruction, run)
