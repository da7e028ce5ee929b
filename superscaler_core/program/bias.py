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
    adders = [part for part in segment if part.op.kind == ADDS_BIAS]
    found: dict[Part, Part] = {}
    mine = set(segment if adders else ())
    for part in adders:
        if not _sums_a_product(part, graph, edges):
            continue
        producer, (wanted, _) = graph.producer[part.op.inputs[0]], part.form.inputs[0]
        if not _takes_bias(producer):
            continue
        products = (p for p in segment if p.op is producer)
        product = next((p for p in products if p.form.outputs[0] == (wanted, ())), None)
        read = ((p, p.form.inputs[0][0]) for p in on_device[part.op])
        others = (p for p, box in read if box.intersect(wanted) is not None)
        if product is not None and mine.issuperset(others):
            found[part] = product
    return found


def _sums_a_product(part: Part, graph: Graph, edges: Edges) -> bool:
    """Whether a part adds a bias to what its own device made, and nobody else reads that."""
    op = part.op
    if (op, 0) in edges.of_reader or op.inputs[0] not in graph.producer:
        return False
    return len(graph.readers[op.inputs[0]]) == 1


def _takes_bias(op: Op) -> bool:
    """Whether an op is a call of a product of two tensors, and so may be a call with a bias."""
    return op.kind in TAKES_BIAS and len(op.inputs) == 2 and isinstance(op.computes, Invocation)
