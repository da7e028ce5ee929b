"""Pair writer: the function of two actions that run as one, on one device."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler_core.codegen.names import Names
from superscaler_core.codegen.run_writer import RunWriter
from superscaler_core.codegen.stage_writer import (
    AROUND,
    STAGE_FUNCTIONS,
    only_for,
    weights_call,
)
from superscaler_core.codegen.statement import Statement, freed
from superscaler_core.codegen.text import function
from superscaler_core.plan import Device
from superscaler_core.program.event import Pair
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.verb import BETWEEN, OF_WEIGHTS

MBS = "mb", "other"
"""The arguments of such a function: the microbatches of its two actions."""


def pair_name(pair: Pair) -> str:
    """The name of a pair's function."""
    (first, run), (second, other) = pair
    return f"stage{first}_{STAGE_FUNCTIONS[run]}_with_stage{second}_{STAGE_FUNCTIONS[other]}"


def pair_functions(made: Materialized, device: Device, names: Names) -> Iterator[str]:
    """The functions of a device's pairs, one for each two runs of stages that are woven."""
    for pair, block in made.step_program.pairs.items():
        if not any(device in made.devices_of(stage, run) for stage, run in pair):
            continue
        writers = [
            RunWriter(made, stage, device, names, mb)
            for (stage, _), mb in zip(pair, MBS, strict=True)
        ]
        around = [AROUND[run] for _, run in pair]
        lines = [line for (begin, _), w in zip(around, writers, strict=True) for line in begin(w)]
        for instruction in block:
            if device not in instruction.devices or instruction.kind in BETWEEN:
                continue
            number = instruction.half or 0
            statements = (
                [Statement(weights_call(made, instruction, device))]
                if instruction.kind in OF_WEIGHTS
                else writers[number].statements(instruction, pair[number][1])
            )
            lines += only_for(instruction, statements, MBS[number])
        lines += [line for (_, end), w in zip(around, writers, strict=True) for line in end(w)]
        yield function(f"def {pair_name(pair)}(run, {', '.join(MBS)}):", freed(lines))
