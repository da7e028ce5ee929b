"""Kept: what a swapped segment keeps from its forward to its backward, which goes to the host."""

from __future__ import annotations

import rvdcomm as rv
from superscaler_core.codegen.segments import Segment
from superscaler_core.graph import Graph
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.tensor import ACTIVATION, ITEM_BYTES, PTensor
from superscaler_core.validate.held import VIEWS


def kept_bytes(made: Materialized, segment: Segment) -> int:
    """Bytes of activations that a segment keeps from its forward to its backward."""
    graph = made.plan.graph
    inside = {part.op for part in segment.parts}
    kept: dict[tuple[PTensor, rv.Box], int] = {}
    for part in segment.parts:
        operands = (*part.inputs, *part.outputs)
        numbers = range(len(part.inputs)) if segment.recompute else part.op.saves
        for view in (operands[number] for number in numbers):
            root = _root(graph, view.tensor)
            # A recomputation keeps what comes from outside.
            is_made_here = segment.recompute and graph.producer.get(view.tensor) in inside
            if root.kind == ACTIVATION and root.requires_grad and not is_made_here:
                kept[root, view.box] = view.box.num_elements * ITEM_BYTES[root.dtype]
    return sum(kept.values())


def _root(graph: Graph, tensor: PTensor) -> PTensor:
    """The tensor whose memory a view shows."""
    while (op := graph.producer.get(tensor)) is not None and op.kind in VIEWS:
        tensor = op.inputs[0]
    return tensor
