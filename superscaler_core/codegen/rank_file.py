"""Rank file: the generated Python text of one rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from superscaler_core.codegen.names import Names
from superscaler_core.codegen.pair_writer import pair_functions, pair_name
from superscaler_core.codegen.segment_writer import Functions
from superscaler_core.codegen.stage_writer import STAGE_FUNCTIONS, StageWriter, weights_call
from superscaler_core.codegen.tables import tables_of, tables_text
from superscaler_core.codegen.text import INDENT, function
from superscaler_core.plan import Device
from superscaler_core.program.event import Event, Woven, pair_of
from superscaler_core.program.events import schedule_of
from superscaler_core.program.instruction import Block
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.verb import OF_WEIGHTS
from superscaler_core.quoted import commented, literal, quoted
from superscaler_core.schedules import Action, ActionKind

_HEAD = '''"""{name}: what rank {device} of {num_devices} runs.

Generated; it can be read, imported and stepped through. A *segment* is what runs between
communication; stages call segments and communicate; ``step`` calls stages by the schedule
{schedule}.{notes}
"""

{imports}from superscaler_core.run.tables import Leg, Packing, RankEdge, Stored, Tables, Weight
'''

_IMPORTS = """import torch
import torch.nn.functional as F
{imports}
from superscaler_core import ops
from superscaler_core.run.tape import like
"""


def rank_files(made: Materialized) -> dict[Device, str]:
    """The text of every device's file."""
    known: dict[Hashable, list[str]] = {}
    return {device: _rank_file(made, device, known) for device in made.plan.devices}


def rank_text(made: Materialized, device: Device) -> str:
    """The text of one device's file."""
    return _rank_file(made, device, {})


def _rank_file(made: Materialized, device: Device, known: dict[Hashable, list[str]]) -> str:
    stages = [stage for stage, program in enumerate(made.stages) if device in program.steps]
    form = tuple(made.stages[stage].text_key(device) for stage in stages)
    key = form, tuple(_done_by(made, device, stages))
    if key not in known:
        known[key] = _functions(made, device, stages)
    texts = [
        _head(made, device),
        *known[key],
        *_updates(made, device),
        _step(made, device),
        tables_text(tables_of(made, device), made.plan.graph),
    ]
    return "\n\n\n".join(text.rstrip("\n") for text in texts) + "\n"


def _done_by(made: Materialized, device: Device, stages: Sequence[int]) -> Iterator[Hashable]:
    """What the functions of stages do on a device, besides what its flows say."""
    for stage in stages:
        for run in made.stages[stage].order:
            for i in made.step_program.on(device, stage, run):
                names = weights_call(made, i, device) if i.kind in OF_WEIGHTS else ""
                yield i.kind, i.name, i.phase, i.half, i.microbatch, names


def segments_text(made: Materialized, device: Device) -> str:
    """The functions of a device's segments as a module of their own."""
    stages = [stage for stage, program in enumerate(made.stages) if device in program.steps]
    names, known = Names(_imports(made)), Functions()
    writers = [StageWriter(made, stage, device, names) for stage in stages]
    texts = [text for writer in writers for text in writer.segment_functions(known)]
    imports = "".join(f"import {module}\n" for module in _imports(made))
    return "\n\n".join([_IMPORTS.format(imports=imports), *texts]) + "\n"


def _functions(made: Materialized, device: Device, stages: Sequence[int]) -> list[str]:
    names, known = Names(_imports(made)), Functions()
    writers = [StageWriter(made, stage, device, names) for stage in stages]
    return [
        *(
            text
            for writer in writers
            for text in (*writer.segment_functions(known), *writer.stage_functions())
        ),
        *pair_functions(made, device, names),
    ]


def _head(made: Materialized, device: Device) -> str:
    notes = "".join(f"\n\nNot what the model says: {commented(note)}." for note in made.plan.notes)
    return _HEAD.format(
        name=commented(made.plan.graph.name),
        device=device,
        num_devices=len(made.plan.devices),
        schedule=commented(schedule_of(made.plan).name),
        notes=notes,
        imports=_IMPORTS.format(imports="".join(f"import {m}\n" for m in _imports(made))),
    )


def _imports(made: Materialized) -> list[str]:
    """The Python modules whose functions the ops call."""
    return sorted({module for op in made.plan.graph.ops for module in op.imports})


def _updates(made: Materialized, device: Device) -> Iterator[str]:
    """The functions that update a stage's weights between microbatches."""
    for (stage, run), block in made.step_program.blocks.items():
        if run is ActionKind.UPDATE and (lines := _around(made, block, device)):
            yield function(f"def stage{stage}_{STAGE_FUNCTIONS[run]}(run):", lines)


def _step(made: Materialized, device: Device) -> str:
    """The function ``step``: the events of the schedule, one call each."""
    program = made.step_program
    lines = [
        "run.begin()",
        *_around(made, program.begin, device),
        *(_event(made, event, device) for event in made.events_on[device]),
        *_around(made, program.end, device),
    ]
    return "\n".join(["def step(run):", *(INDENT + line for line in lines)])


def _around(made: Materialized, block: Block, device: Device) -> list[str]:
    """The calls of a device before or after all stages."""
    return [
        weights_call(made, instruction, device)
        for instruction in block
        if device in instruction.devices
    ]


def _event(made: Materialized, event: Event, device: Device) -> str:
    if isinstance(event, Action):
        mb = event.microbatch * made.step_program.num_halves
        name = f"stage{event.stage}_{STAGE_FUNCTIONS[event.kind]}"
        if event.kind is ActionKind.UPDATE:
            return f"{name}(run)"
        if event.kind is ActionKind.TURN:
            return f"run.without_grad({name}, {mb}, turn={event.turn})"
        version = made.step_program.versions.get(event, 0)
        is_back = event.kind is not ActionKind.FORWARD
        borrowed = {
            use.name: made.borrowed[event, use.owner]
            for use in made.borrowers.get(event.stage, ())
            if use.owner is not None and device in use.side.shards
        }
        if version or any(borrowed.values()) or (is_back and made.has_one_version):
            more = f", borrowed={literal(borrowed)}" if borrowed else ""
            call = "reads_back" if is_back else "reads"
            return f"run.{call}({name}, {mb}, version={version}{more})"
        return f"{name}(run, {mb})"
    if isinstance(event, Woven):
        return (
            f"{pair_name(pair_of(event))}(run, {event.first.microbatch}, {event.second.microbatch})"
        )
    which = "carry_back" if event.is_back else "carry"
    return f"run.{which}({quoted(event.name)}, {event.microbatch})"
