"""Holdings: which ranks hold which part of which boxes. Replicas are not numbered.

Every state between two steps of a plan is a placement: a layout (one box per rank), or an
intermediate state whose ranks hold strided blocks (several boxes per rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rvdcomm.layout.box import Box


@dataclass(frozen=True, slots=True)
class Holding:
    """Boxes of one value part, in memory order, and the ranks (ascending) that each hold them."""

    part: int
    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements that each of the ranks holds."""
        return sum(box.num_elements for box in self.boxes)


@dataclass(frozen=True)
class Holdings:
    """All holdings of one tensor; every rank is in exactly one of them.

    Law (tests/planning/test_binding.py): for every part, the boxes of its holdings tile the tensor.
    """

    shape: tuple[int, ...]
    num_parts: int
    holdings: tuple[Holding, ...]

    @cached_property
    def by_rank(self) -> dict[int, Holding]:
        """The holding of every rank."""
        return {rank: holding for holding in self.holdings for rank in holding.ranks}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return tuple(sorted(self.by_rank))

    def num_elements(self, rank: int) -> int:
        """Elements that ``rank`` holds; 0 for a rank outside the placement."""
        holding = self.by_rank.get(rank)
        return holding.num_elements if holding else 0
