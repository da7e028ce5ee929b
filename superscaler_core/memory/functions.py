"""Functions: the function of a segment, as generated code has it."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it

from superscaler_core import ops
from superscaler_core.codegen.line_writer import LineWriter
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import SegmentWriter
from superscaler_core.program.flow import Flow
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.run.tape import SegmentFunction


def function_of(made: Materialized, flow: Flow, segment: Segment) -> SegmentFunction:
    """The function of a segment on the device whose values are given."""
    writer = SegmentWriter(made, flow, LineWriter(made, Names()))
    scope: dict[str, Any] = {"torch": torch, "F": F, "ops": ops}
    for path in {path for part in segment.parts for path in part.op.imports}:
        importlib.import_module(path)
        root = path.partition(".")[0]
        scope[root] = importlib.import_module(root)
    exec(writer.function(segment), scope)
    return cast(SegmentFunction, scope[segment.name])
