"""Rank file: the Python text that one rank runs."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.codegen.names import Names
from superscaler_core.codegen.stage_writer import StageWriter
from superscaler_core.codegen.table_text import tables_text
from superscaler_core.codegen.text import INDENT
from superscaler_core.front_end.register import registered_modules
from superscaler_core.plan import Device
from superscaler_core.program.events import schedule_of
from superscaler_core.program.instruction import Carry, Event
from superscaler_core.program.materialized import Materialized
from superscaler_core.schedules import Action

_HEAD = '''"""{name}: what rank {device} of {num_devices} runs.

Generated; it can be read, imported and stepped through. A *segment* is what runs between
communication; stages call segments and communicate; ``step`` calls stages by the schedule
{schedule}.{notes}
"""

import torch
import torch.nn.functional as F
{imports}
from superscaler_core import ops
from superscaler_core.run.tables import Leg, RankEdge, Stored, Tables, Weight
'''


def rank_files(made: Materialized) -> dict[Device, str]:
    """The text of every device's file."""
    return {device: _rank_file(made, device) for device in made.plan.devices}


def _rank_file(made: Materialized, device: Device) -> str:
    names = Names()
    writers = [
        StageWriter(made, stage, device, names)
        for stage, program in enumerate(made.stages)
        if device in program.steps
    ]
    recomputed = [name for writer in writers for name in writer.recomputed]
    swapped = [name for writer in writers for name in writer.swapped]
    texts = [
        _head(made, device),
        *(text for writer in writers for text in writer.functions()),
        _step(made.events_on[device]),
        tables_text(made, device, recomputed, swapped),
    ]
    return "\n\n\n".join(text.rstrip("\n") for text in texts) + "\n"


def _head(made: Materialized, device: Device) -> str:
    modules = sorted({m for op in made.plan.graph.ops for m in registered_modules(op)})
    notes = "".join(f"\n\nNot what the model says: {note}." for note in made.plan.notes)
    return _HEAD.format(
        name=made.plan.graph.name,
        device=device,
        num_devices=len(made.plan.devices),
        schedule=schedule_of(made.plan).name,
        notes=notes,
        imports="".join(f"import {module}\n" for module in modules),
    )


_CALLS = {
    "F": "stage{stage}_forward(run, {mb})",
    "B": "stage{stage}_backward(run, {mb})",
    "f": "run.without_grad(stage{stage}_forward, {mb}, turn={turn})",
}


def _step(events: Sequence[Event]) -> str:
    """The function ``step``: the schedule, call by call."""
    lines = ["def step(run):", f"{INDENT}run.begin()"]
    lines += [INDENT + _event(event) for event in events]
    lines.append(f"{INDENT}run.end()")
    return "\n".join(lines)


def _event(event: Event) -> str:
    if isinstance(event, Action):
        mb = event.microbatch
        return _CALLS[event.kind].format(stage=event.stage, mb=mb, turn=event.turn)
    assert isinstance(event, Carry)
    which = "carry_back" if event.is_back else "carry"
    return f'run.{which}("{event.edge.name}", {event.microbatch})'
