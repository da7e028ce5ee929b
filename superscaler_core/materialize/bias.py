"""Bias: finds bias additions that can run inside the call of the product before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.part import Part
from superscaler_core.materialize.edges import Edges

TAKES_BIAS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Kinds of products whose torch functions accept a bias."""

ADDS_BIAS = "add_bias"
"""Kind of the op that adds a bias."""


def products_of(
    graph: Graph, edges: Edges, segment: Sequence[Part], on_device: Mapping[Op, Sequence[Part]]
) -> Mapping[Part, Part]:
    """For each part that adds a bias, the product that can add it in its own call.

    The graph has two ops, so that a product's sum can be cut. Where it is not cut, one torch call
    does both.

    Args:
        graph: graph of the plan.
        edges: edges of the plan.
        segment: the parts to look at, in order.
        on_device: for each op all its parts on the device, including those in other segments. A
            product that one of those parts reads is left alone.
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
        products = (p for p in on_device.get(producer, ()) if p in mine)
        product = next((p for p in products if adds_whole_product(part, p)), None)
        read = ((p, p.form.inputs[0][0]) for p in on_device[part.op])
        others = (p for p, box in read if box.overlaps(wanted))
        if product is not None and mine.issuperset(others):
            found[part] = product
    return found


def adds_whole_product(part: Part, product: Part) -> bool:
    """Whether a part is a bias addition to exactly what another part computes."""
    return part.op.kind == ADDS_BIAS and product.form.outputs[0] == (part.form.inputs[0][0], ())


def _sums_a_product(part: Part, graph: Graph, edges: Edges) -> bool:
    """Whether a part adds a bias to a product of its own device that no other part reads."""
    op = part.op
    if (op, 0) in edges.of_reader or op.inputs[0] not in graph.producer:
        return False
    return len(graph.readers[op.inputs[0]]) == 1


def _takes_bias(op: Op) -> bool:
    """Whether an op is a call of a product of two tensors, which can also take a bias."""
    return op.kind in TAKES_BIAS and len(op.inputs) == 2 and isinstance(op.computes, Invocation)
