"""Rank file: the generated Python text of one rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from superscaler_core.codegen.line_writer import LineWriter
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import Functions
from superscaler_core.codegen.stage_writer import StageWriter, pair_functions, update_functions
from superscaler_core.codegen.table_text import tables_of, tables_text
from superscaler_core.codegen.text import INDENT
from superscaler_core.materialize.events import schedule_of
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.plan import Device
from superscaler_core.program.instruction import Block
from superscaler_core.program.verb import OF_WEIGHTS
from superscaler_core.quoted import commented
from superscaler_core.run.blocks import AROUND, event_call, lines_of
from superscaler_core.training.load import module_from

_HEAD = '''"""{name}: what rank {device} of {num_devices} runs.

Generated; it can be read, imported and stepped through. A *segment* is what runs between
communication; stages call segments and communicate; ``step`` calls stages by the schedule
{schedule}.{notes}
"""

{imports}from superscaler_core.run.tables import (
    Packing, RankEdge, Stored, SubTransfer, Tables, Weight,
)
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
    stages = _stages(made, device)
    form = tuple(made.stages[stage].text_key(device) for stage in stages)
    key = form, tuple(_done_by(made, device, stages))
    if key not in known:
        known[key] = _functions(made, device)
    texts = [
        _head(made, device),
        *known[key],
        *update_functions(made, device),
        _step(made, device),
        tables_text(tables_of(made, device), made.plan.graph),
    ]
    return "\n\n\n".join(text.rstrip("\n") for text in texts) + "\n"


def _done_by(made: Materialized, device: Device, stages: Sequence[int]) -> Iterator[Hashable]:
    """What the functions of stages do on a device, besides what its flows say."""
    for stage in stages:
        for run in made.stages[stage].order:
            block = made.step_program.on(device, stage, run)
            of_weights = [i for i in block if i.kind in OF_WEIGHTS]
            yield tuple((i.kind, i.name, i.phase, i.half, i.microbatch) for i in block)
            yield tuple(lines for _, _, lines in lines_of(made, device, AROUND, of_weights))


def functions_of(made: Materialized, device: Device) -> Mapping[str, Any]:
    """The functions of a device's segments, by name."""
    names, known = Names(_modules(made)), Functions()
    writers = [StageWriter(made, stage, device, names) for stage in _stages(made, device)]
    texts = [text for writer in writers for text in writer.segment_functions(known)]
    return vars(module_from("\n\n".join([_imports(made), *texts]) + "\n", device))


def _functions(made: Materialized, device: Device) -> list[str]:
    names, known = Names(_modules(made)), Functions()
    writers = [StageWriter(made, stage, device, names) for stage in _stages(made, device)]
    texts = ((*w.segment_functions(known), *w.stage_functions()) for w in writers)
    return [*(text for each in texts for text in each), *pair_functions(made, device, names)]


def _stages(made: Materialized, device: Device) -> Sequence[int]:
    """The stages of which a device runs steps."""
    return [stage for stage, program in enumerate(made.stages) if device in program.steps]


def _head(made: Materialized, device: Device) -> str:
    notes = "".join(f"\n\nNot what the model says: {commented(note)}." for note in made.plan.notes)
    return _HEAD.format(
        name=commented(made.plan.graph.name),
        device=device,
        num_devices=len(made.plan.devices),
        schedule=commented(schedule_of(made.plan).name),
        notes=notes,
        imports=_imports(made),
    )


def _imports(made: Materialized) -> str:
    """The imports of a file."""
    return _IMPORTS.format(imports="".join(f"import {module}\n" for module in _modules(made)))


def _modules(made: Materialized) -> list[str]:
    """The Python modules whose functions the ops call."""
    return sorted({module for op in made.plan.graph.ops for module in op.imports})


def _step(made: Materialized, device: Device) -> str:
    """The function ``step``: the events of the schedule, one call each."""
    program, writer = made.step_program, LineWriter(made, Names())
    calls = [
        "run.begin()",
        *_around(made, program.begin, device),
        *(writer.text(event_call(made, event, device)) for event in made.events_on[device]),
        *_around(made, program.end, device),
    ]
    return "\n".join(["def step(run):", *(INDENT + call for call in calls)])


def _around(made: Materialized, block: Block, device: Device) -> Iterator[str]:
    """The calls of a device before or after all stages."""
    writer = LineWriter(made, Names())
    for _, _, lines in lines_of(made, device, AROUND, block):
        yield from (writer.text(line.value) for line in lines)
