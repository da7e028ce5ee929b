"""Runs: the spaces of all runs of layers of a model, from one priced space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from superscaler_core.graph.graph import Op
from superscaler_core.space import PricedSpace, Space

OpGroup = tuple[Op, ...]

Run = tuple[int, int]
"""A run of consecutive layers: the first one, and the one after the last."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Runs:
    """A priced space with the counts of its nodes and edges per layer; they give each run's space.

    Repeated blocks take one decision. So a run differs from the whole model only in how often each
    node and edge occurs.

    Law (tests/superscaler_core/published/alpa): the space of all layers is the space itself;
    a run of layers has the costs of ``price_space(..., ops=...)`` for its ops.

    Attributes:
        priced: the space of the model.
        layers: the ops of every layer; together these are all ops, in order.
    """

    priced: PricedSpace
    layers: tuple[OpGroup, ...]

    @cached_property
    def _layer_of(self) -> dict[Op, int]:
        return {op: number for number, ops in enumerate(self.layers) for op in ops}

    @cached_property
    def nodes(self) -> Counts:
        """How often a node occurs in a layer, ``[node, layer]``."""
        found = np.zeros((len(self.priced.groups), len(self.layers)), dtype=np.int64)
        for node, groups in enumerate(self.priced.groups):
            for group in groups:
                found[node, self._layer_of[group[-1]]] += 1
        return found

    @cached_property
    def _reads(self) -> Mapping[tuple[int, int], Counts]:
        """For two nodes, how often the second reads the first: ``[layer written, layer read]``."""
        place = {
            op: (node, number)
            for node, groups in enumerate(self.priced.groups)
            for number, group in enumerate(groups)
            for op in group
        }
        found: dict[tuple[int, int], Counts] = {}
        shape = len(self.layers), len(self.layers)
        for tensor, writer in self.priced.costs.graph.producer.items():
            readers = {
                place[op]: self._layer_of[op]
                for op, _ in self.priced.costs.graph.readers.get(tensor, ())
                if place[op] != place[writer]
            }
            for (node, _), layer in readers.items():
                pairs = found.setdefault((place[writer][0], node), np.zeros(shape, dtype=np.int64))
                pairs[self._layer_of[writer], layer] += 1
        return found

    @cached_property
    def _nodes_before(self) -> Counts:
        """How often a node occurs in the layers before a given one, ``[node, layer]``."""
        return np.pad(self.nodes.cumsum(axis=1), ((0, 0), (1, 0)))

    @cached_property
    def _edges_before(self) -> NDArray[np.float64]:
        """How often an edge has writer and reader before two layers, ``[edge, layer, layer]``."""
        edges = self.priced.space.edges
        shape = len(edges), len(self.layers), len(self.layers)
        found = np.zeros(shape)
        for number, edge in enumerate(edges):
            reads = self._reads[edge.src, edge.dst]
            # Several reads between the same two nodes were merged into one edge.
            found[number] = edge.count * reads / reads.sum()
        return np.pad(found.cumsum(axis=1).cumsum(axis=2), ((0, 0), (1, 0), (1, 0)))

    def node_counts(self, runs: Sequence[Run]) -> Counts:
        """How often every node occurs in runs, ``[run, node]``."""
        first, end = np.array(runs).T
        return (self._nodes_before[:, end] - self._nodes_before[:, first]).T

    def edge_counts(self, runs: Sequence[Run]) -> Counts:
        """How often every edge occurs in runs, ``[run, edge]``."""
        first, end = np.array(runs).T
        before = self._edges_before
        below = before[:, first, end] + before[:, end, first] - before[:, first, first]
        return (before[:, end, end] - below).round().astype(np.int64).T

    def keys(self, runs: Sequence[Run]) -> list[bytes]:
        """A key for every run; runs with equal spaces have equal keys."""
        counts = np.concatenate([self.node_counts(runs), self.edge_counts(runs)], axis=1)
        return [mine.tobytes() for mine in counts]

    def space(self, first: int, end: int) -> tuple[Space, tuple[int, ...]]:
        """The space of layers ``first`` to ``end - 1``, and its nodes' numbers in the whole one."""
        whole = self.priced.space
        (counts,) = self.node_counts([(first, end)]).tolist()
        (edge_counts,) = self.edge_counts([(first, end)]).tolist()
        numbers = tuple(node for node, count in enumerate(counts) if count)
        new = {node: number for number, node in enumerate(numbers)}
        edges = tuple(
            replace(edge, src=new[edge.src], dst=new[edge.dst], count=count)
            for edge, count in zip(whole.edges, edge_counts, strict=True)
            if count
        )
        nodes = tuple(replace(whole.nodes[node], count=counts[node]) for node in numbers)
        return replace(whole, nodes=nodes, edges=edges), numbers
