"""Edges: the costs of moving results from the group that writes them to a group that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import numpy as np

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.space.nodes import Nodes
from superscaler_core.space.space import Array, SpaceEdge


@dataclass(frozen=True, eq=False, slots=True)
class _Read:
    """A result of a group that ops of another group read, each with its place in its group."""

    tensor: PTensor
    src: int
    dst: int
    readers: Mapping[Op, int]


def edges_of(nodes: Nodes) -> tuple[SpaceEdge, ...]:
    """All edges; edges between the same two nodes that occur equally often are merged into one."""
    found: dict[tuple[int, int, int], tuple[Array, Array]] = {}
    priced: dict[object, tuple[Array, Array]] = {}
    for key, reads in _reads(nodes).items():
        first, (src, dst, *where) = reads[0], key
        # Edges between nodes with the same choices have the same costs.
        writer = nodes.costs.graph.producer[first.tensor]
        blocks = [nodes.block_of(op) for op in (writer, *first.readers)]
        form = writer.form, len(set(blocks)), *(op.form for op in first.readers)
        alike = id(nodes.choices[src]), id(nodes.choices[dst]), form, *where
        if alike not in priced:
            priced[alike] = _edge(nodes, first)
        forward, backward = priced[alike]
        ends = src, dst, len(reads)
        before = found.get(ends, (0.0, 0.0))
        found[ends] = before[0] + forward, before[1] + backward
    return tuple(SpaceEdge(*ends[:2], *secs, ends[2]) for ends, secs in found.items())


def _reads(nodes: Nodes) -> Mapping[tuple[int, ...], Sequence[_Read]]:
    """All reads of other groups' results; reads with equal costs are collected under one key.

    A key has the nodes of both groups, the places of the writer and of the readers in their groups,
    and the positions of the tensor in the writer's outputs and the readers' inputs.
    """
    found: dict[tuple[int, ...], list[_Read]] = {}
    for op in nodes.ops:
        src, mine, place = nodes.places[op]
        for number, tensor in enumerate(op.outputs):
            reads: dict[tuple[int, int], list[tuple[Op, int, int]]] = {}
            for reader, position in nodes.costs.graph.readers.get(tensor, ()):
                dst, other, at = nodes.places.get(reader, (src, mine, 0))
                if (dst, other) != (src, mine):
                    reads.setdefault((dst, other), []).append((reader, at, position))
            for (dst, _), ends in reads.items():
                key = src, dst, place, number, *(i for _, *end in ends for i in end)
                readers = {reader: at for reader, at, _ in ends}
                found.setdefault(key, []).append(_Read(tensor, src, dst, readers))
    return found


def _edge(nodes: Nodes, read: _Read) -> tuple[Array, Array]:
    """Forward and backward seconds of moving a result, ``[choice of src, choice of dst]``."""
    graph = nodes.costs.graph
    writer = graph.producer[read.tensor]
    _, number, place = nodes.places[writer]
    group = nodes.groups[read.src][number]
    choices = nodes.choices[read.src], nodes.choices[read.dst]
    found = np.full((3, *map(len, choices)), inf)
    for a, before in enumerate(choices[0]):
        storage = before.storage(graph, group)
        for b, after in enumerate(choices[1]):
            splits = {op: after.splits[at] for op, at in read.readers.items()}
            splits[writer] = before.splits[place]
            # Where partial sums of overlapping parts give no value, the pair stays infinite.
            with suppress(PlanError):
                secs = nodes.costs.moving_secs(read.tensor, splits, storage=storage)
                found[:, a, b] = secs
    # A move inside a recomputed block is repeated with the recomputation.
    blocks = {nodes.block_of(writer), *map(nodes.block_of, read.readers)}
    again = found[0] if len(blocks) == 1 and None not in blocks else 0.0
    return found[0], found[1] + again + found[2] / nodes.microbatches
