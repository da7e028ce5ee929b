"""Demands: what a pair of layouts asks for, element by element, with equal elements as one.

A demand says which ranks hold each value part of some elements under ``src``, and which ranks need
their sum under ``dst``. The bound of a network counts them; trees serve them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rvdcomm.cost.atoms import Atoms
from rvdcomm.layout import Box, Layout, merged

Ranks = frozenset[int]


@dataclass(frozen=True, slots=True)
class Demand:
    """Elements of which the same ranks hold the same parts, and which the same ranks need.

    Attributes:
        num_elements: how many they are.
        parts: the ranks that hold each value part of ``src``.
        readers: the ranks that need the sum of all parts.
    """

    num_elements: int
    parts: tuple[Ranks, ...]
    readers: Ranks

    def is_served(self, rank: int) -> bool:
        """Whether a rank has all parts at the start."""
        return all(rank in holders for holders in self.parts)


def demands_of(src: Layout, dst: Layout) -> tuple[Demand, ...]:
    """The demands of a pair whose ``dst`` has one value part, those of most elements first.

    >>> demands_of(Layout((4,), "R(1)V(2)D(1)"), Layout((4,), "R(1)V(1)D(2)"))[0].readers
    frozenset({0})
    """
    return tuple(demand for demand, _ in demand_boxes(src, dst))


def demand_boxes(src: Layout, dst: Layout) -> tuple[tuple[Demand, tuple[Box, ...]], ...]:
    """The demands, as ``demands_of`` gives them, each with the boxes of its elements."""
    atoms = Atoms.of(src, dst)
    if not len(atoms.sizes):
        return ()
    ranks = sorted({*src.ranks, *dst.ranks})
    index = {rank: i for i, rank in enumerate(ranks)}
    has = atoms.masks(src.placement, index, len(ranks))
    wants = atoms.masks(dst.placement, index, len(ranks))[0]
    rows = np.concatenate([has.reshape(-1, has.shape[2]), wants]).T
    kinds, of_kind = np.unique(rows, axis=0, return_inverse=True)
    sizes = np.bincount(of_kind.reshape(-1), weights=atoms.sizes, minlength=len(kinds))
    boxes: list[list[Box]] = [[] for _ in kinds]
    for box, kind in zip(atoms.boxes(), of_kind.reshape(-1), strict=True):
        boxes[kind].append(box)
    found = []
    for kind, size, mine in zip(kinds, sizes, boxes, strict=True):
        *parts, readers = kind.reshape(-1, len(ranks))
        named = [frozenset(ranks[i] for i in np.flatnonzero(mask)) for mask in (*parts, readers)]
        found.append((Demand(int(size), tuple(named[:-1]), named[-1]), merged(mine)))
    return tuple(sorted(found, key=_order))


def _order(found: tuple[Demand, tuple[Box, ...]]) -> tuple[int, list[list[int]], list[int]]:
    demand, _ = found
    return -demand.num_elements, list(map(sorted, demand.parts)), sorted(demand.readers)
