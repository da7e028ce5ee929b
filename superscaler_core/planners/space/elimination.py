"""Elimination: the least time of a space by dynamic programming over its nodes.

A node that is eliminated is replaced by a table over its neighbours: the least time of the node and
its edges, for every choice of theirs. The node with the smallest such table is next. On a chain
this is the usual programme from one end; on a graph whose parts are joined by few edges, the tables
are those of the few nodes that lie between what was eliminated and the rest.

Complexity: the sum of the tables, which is exponential in the number of neighbours that a node has
when it is eliminated. Models have two or three, as a residual and a branch. Exact.

Source: Bertele, Brioschi, Nonserial Dynamic Programming, 1972; the order is "minimum weight".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from superscaler_core.errors import PlanError
from superscaler_core.planners.space.space import Array, Solution, Space

MOST_ENTRIES = 20_000_000
"""Of a table; 160 MB."""


@dataclass(frozen=True, eq=False, slots=True)
class _Table:
    """Times by the choices of some nodes, ``[choice of each]``; there may be several of the same
    nodes.
    """

    nodes: tuple[int, ...]
    secs: Array


def eliminate(space: Space) -> Solution:
    """The assignment of the least time, whatever memory it needs, and so a bound for those that
    fit.

    Raises:
        PlanError: all choices exclude each other, or a table is too large.
    """
    counts = [node.num_choices for node in space.nodes]
    tables, near = _tables(space)
    entries = {node: prod(counts[i] for i in (node, *near[node])) for node in near}
    best: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    while entries:
        node = min(entries, key=lambda i: (entries[i], i))
        if entries.pop(node) > MOST_ENTRIES:
            raise PlanError(
                f"elimination of {len(counts)} nodes: a table has more than {MOST_ENTRIES:,} "
                "entries; use a planner that searches, such as flexflow."
            )
        others = tuple(sorted(near.pop(node)))
        total = np.zeros([counts[i] for i in (*others, node)])
        for table in tables.pop(node):
            total += _spread(table, (*others, node), counts)
            for other in table.nodes:
                if other != node:
                    tables[other].remove(table)
        best.append((node, others, total.argmin(axis=-1)))
        made = _Table(others, total.min(axis=-1))
        for other in others:
            tables[other].append(made)
            near[other] |= set(others)
            near[other] -= {other, node}
            entries[other] = prod(counts[i] for i in (other, *near[other]))
    chosen: dict[int, int] = {}
    for node, others, choice in reversed(best):
        chosen[node] = int(choice[tuple(chosen[other] for other in others)])
    found = space.solution([chosen[i] for i in range(len(counts))])
    if not found.secs < np.inf:
        raise PlanError(f"elimination: all choices of {len(counts)} nodes exclude each other.")
    return Solution(found.assignment, found.secs, found.secs)


def _tables(space: Space) -> tuple[dict[int, list[_Table]], dict[int, set[int]]]:
    """The tables that each node is in, and its neighbours."""
    near: dict[int, set[int]] = {node: set() for node in range(len(space.nodes))}
    tables: dict[int, list[_Table]] = {
        node: [_Table((node,), space.node_secs[node])] for node in near
    }
    for edge, secs in zip(space.edges, space.edge_secs, strict=True):
        if edge.src == edge.dst:
            tables[edge.src].append(_Table((edge.src,), np.diagonal(secs)))
            continue
        made = _Table((edge.src, edge.dst), secs)
        for end, other in ((edge.src, edge.dst), (edge.dst, edge.src)):
            tables[end].append(made)
            near[end].add(other)
    return tables, near


def _spread(table: _Table, nodes: Sequence[int], counts: Sequence[int]) -> Array:
    """A table with a dim for each of these nodes, of size 1 for those that it is not about."""
    own, secs = table.nodes, table.secs
    order = sorted(range(len(own)), key=lambda i: nodes.index(own[i]))
    return secs.transpose(order).reshape([counts[i] if i in own else 1 for i in nodes])
