"""Bias: sums with a bias that a product makes in its own call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.part import Part
from superscaler_core.program.edges import Edges

TAKES_BIAS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Kinds of products whose functions in torch take a bias."""

ADDS_BIAS = "add_bias"
"""Kind of the op that adds one."""


def products_of(
    graph: Graph, edges: Edges, segment: Sequence[Part], on_device: Mapping[Op, Sequence[Part]]
) -> Mapping[Part, Part]:
    """By part that adds a bias, the product that does it: one call instead of two.

    They are two ops so that a product's sum may be cut; where it is not, torch does both at once.

    Args:
        graph: of the plan.
        edges: of the plan.
        segment: the parts among which to look, in order.
        on_device: by op all its parts on the device, which may be in other segments too. A product
            that one of those reads is left alone.
    """
    if not any(part.op.kind == ADDS_BIAS for part in segment):
        return {}
    made: dict[Op, list[Part]] = {}
    for part in segment:
        if part.op.kind in TAKES_BIAS and isinstance(part.op.computes, Invocation):
            made.setdefault(part.op, []).append(part)
    found: dict[Part, Part] = {}
    mine = set(segment)
    for part in segment:
        if not _sums_a_product(part, graph, edges):
            continue
        products = made.get(graph.producer[part.op.inputs[0]], ())
        wanted = part.inputs[0].box
        same = (p for p in products if p.outputs[0].box == wanted and not p.outputs[0].summand)
        product = next(same, None)
        others = (p for p in on_device[part.op] if p.inputs[0].box.intersect(wanted) is not None)
        if product is not None and mine.issuperset(others):
            found[part] = product
    return found


def _sums_a_product(part: Part, graph: Graph, edges: Edges) -> bool:
    """Whether a part adds a bias to what its own device made, and nobody else reads that."""
    op = part.op
    if op.kind != ADDS_BIAS or (op, 0) in edges.of_reader or op.inputs[0] not in graph.producer:
        return False
    return len(graph.readers[op.inputs[0]]) == 1
