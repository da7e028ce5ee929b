"""Neighbours: effects between consecutive ops that single costs do not include."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.materialize.bias import ADDS_BIAS, TAKES_BIAS
from superscaler_core.materialize.edges import reads_weights_alone, shares_of
from superscaler_core.materialize.sharding import Sharding, shardings_of
from superscaler_core.plan import Device, OpSplit


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Ops of a graph that run on the same devices, with the split of each."""

    graph: Graph
    splits: Mapping[Op, OpSplit]

    def ways(self, tensor: PTensor) -> Iterable[tuple[Sharding, Sharding]]:
        """The ends of all moves of a result; readers of the same shards share one end."""
        op = self.graph.producer[tensor]
        src = shardings_of(op.form, self.splits[op]).outputs[op.outputs.index(tensor)]
        return ((src, dst) for dst in self._ends(tensor))

    def shares(self, op: Op) -> Mapping[Device, int] | None:
        """The share of its gradient that each replica computes; None if each computes all of it."""
        if not reads_weights_alone(op):
            return None
        readers = self.graph.readers.get(op.outputs[0], ())
        if any(reader not in self.splits for reader, _ in readers):
            return None
        return shares_of(op.form, self.splits[op], Sharding.joined(self._ends(op.outputs[0])))

    def is_joined(self, op: Op) -> bool:
        """Whether a product adds the bias of an op in its own call, on every device."""
        product = product_of(self.graph, op)
        if product is None or product not in self.splits:
            return False
        src = shardings_of(product.form, self.splits[product]).outputs[0]
        dst = shardings_of(op.form, self.splits[op]).inputs[0]
        return src.num_summands == 1 and src.views == dst.views

    def _ends(self, tensor: PTensor) -> Iterable[Sharding]:
        """The distinct ends at which these ops read a tensor."""
        readers = (r for r in self.graph.readers.get(tensor, ()) if r[0] in self.splits)
        return dict.fromkeys(
            shardings_of(reader.form, self.splits[reader]).inputs[i] for reader, i in readers
        )


def product_of(graph: Graph, op: Op) -> Op | None:
    """The product that adds the bias of an op in its own call, where both are cut alike."""
    product = graph.producer.get(op.inputs[0]) if op.kind == ADDS_BIAS else None
    if product is None or product.kind not in TAKES_BIAS or len(product.inputs) != 2:
        return None
    return product if len(graph.readers[op.inputs[0]]) == 1 else None
