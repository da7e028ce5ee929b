"""Runs: the spaces of all runs of layers of a model, from one priced space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from superscaler_core.graph.graph import Op
from superscaler_core.planners.space import PricedSpace, Space

OpGroup = tuple[Op, ...]


@dataclass(frozen=True, eq=False)
class Runs:
    """A priced space, seen layer by layer.

    Repeated blocks take one decision, so a run differs from the model in how often each node and
    edge occurs, and in nothing else.

    Law (tests/superscaler_core/planners/hierarchical): the space of all layers is the
    space itself; a run of layers has the costs of ``price_space(..., ops=...)`` for its ops.

    Attributes:
        priced: the space of the model.
        layers: all ops, in order.
    """

    priced: PricedSpace
    layers: tuple[OpGroup, ...]

    @cached_property
    def _layer_of(self) -> dict[Op, int]:
        return {op: number for number, ops in enumerate(self.layers) for op in ops}

    @cached_property
    def nodes(self) -> NDArray[np.int64]:
        """How often a node occurs in a layer, ``[node, layer]``."""
        found = np.zeros((len(self.priced.groups), len(self.layers)), dtype=np.int64)
        for node, groups in enumerate(self.priced.groups):
            for group in groups:
                found[node, self._layer_of[group[-1]]] += 1
        return found

    @cached_property
    def _reads(self) -> dict[tuple[int, int], NDArray[np.int64]]:
        """By two nodes the layers of all pairs of groups of which one reads the other."""
        place = {
            op: (node, number)
            for node, groups in enumerate(self.priced.groups)
            for number, group in enumerate(groups)
            for op in group
        }
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for tensor, writer in self.priced.costs.graph.producer.items():
            readers = {
                place[op]: self._layer_of[op]
                for op, _ in self.priced.costs.graph.readers.get(tensor, ())
                if place[op] != place[writer]
            }
            for (node, _), layer in readers.items():
                ends = place[writer][0], node
                found.setdefault(ends, []).append((self._layer_of[writer], layer))
        return {ends: np.array(layers) for ends, layers in found.items()}

    def key(self, first: int, end: int) -> tuple[int, ...]:
        """Equal for runs of equal spaces."""
        nodes = self.nodes[:, first:end].sum(axis=1).tolist()
        edges = (self._count((edge.src, edge.dst), first, end) for edge in self.priced.space.edges)
        return (*nodes, *edges)

    def _count(self, ends: tuple[int, int], first: int, end: int) -> int:
        layers = self._reads[ends]
        return int(((layers >= first) & (layers < end)).all(axis=1).sum())

    def space(self, first: int, end: int) -> tuple[Space, tuple[int, ...]]:
        """The space of layers ``first`` to ``end - 1``, and its nodes' numbers in the whole."""
        whole = self.priced.space
        counts = self.nodes[:, first:end].sum(axis=1).tolist()
        numbers = tuple(node for node, count in enumerate(counts) if count)
        new = {node: number for number, node in enumerate(numbers)}
        edges = []
        for edge in whole.edges:
            ends = edge.src, edge.dst
            # Several reads of equal ends were summed to one edge.
            count = edge.count * self._count(ends, first, end) / len(self._reads[ends])
            if count:
                src, dst = new[edge.src], new[edge.dst]
                edges.append(replace(edge, src=src, dst=dst, count=round(count)))
        nodes = tuple(replace(whole.nodes[node], count=counts[node]) for node in numbers)
        return replace(whole, nodes=nodes, edges=tuple(edges)), numbers
