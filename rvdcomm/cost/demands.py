"""Demands: what a pair of layouts asks for, element by element, with equal elements as one.

A demand says which ranks hold each value part of some elements under ``src``, and which ranks need
their sum under ``dst``. The bound of a network counts them; trees serve them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import numpy as np

from rvdcomm.cost.atoms import Atoms
from rvdcomm.layout import Box, Layout, merged

Ranks = frozenset[int]

MAX_UNITS = 1024
"""Sizes of demands are told apart up to this part of the largest one (``in_units``)."""


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


@lru_cache(maxsize=16)
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
    return tuple(sorted(found, key=lambda pair: _order(pair[0])))


def in_units(demands: Sequence[Demand]) -> tuple[float, tuple[Demand, ...], list[int]]:
    """A unit, the demands in units, and for each of these its place among ``demands``.

    They are exact if few units make the largest one, else rounded, to 1 or more. So equal layouts
    in another shape give equal demands, also if shards differ by an element or two.

    >>> parts = (frozenset({0}),)
    >>> unit, found, _ = in_units([Demand(6, parts, frozenset({1})), Demand(4, parts, frozenset())])
    >>> unit, [demand.num_elements for demand in found]
    (2.0, [3, 2])
    """
    sizes = [demand.num_elements for demand in demands]
    unit = max(float(gcd(*sizes) or 1), max(sizes, default=1) / MAX_UNITS)
    alike = [replace(d, num_elements=max(1, round(d.num_elements / unit))) for d in demands]
    order = sorted(range(len(alike)), key=lambda i: _order(alike[i]))
    return unit, tuple(alike[i] for i in order), order


def _order(demand: Demand) -> tuple[int, list[list[int]], list[int]]:
    """The key by which demands are sorted: those of most elements first."""
    return -demand.num_elements, list(map(sorted, demand.parts)), sorted(demand.readers)
