"""Side: who writes a tensor, or who reads it; either end of a data dependency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import rvdcomm as rv
from superscaler_core.graph.tensor import VTensor
from superscaler_core.plan import Device


@dataclass(frozen=True, slots=True, order=True)
class View:
    """What a device touches of a tensor: a box, and which of the summands of it.

    Of a written value the summands add up to it; of a value that is read, its readers' gradients
    are summands of its gradient.
    """

    device: Device
    box: rv.Box
    summand: int


@dataclass(frozen=True)
class Side:
    """All views of one end; canonical, so that equal ends are equal objects.

    Laws (tests/superscaler_core/program/test_transfer.py): summands are numbered from 0 to
    ``num_summands - 1``; the order in which views are given does not matter.
    """

    num_summands: int
    views: tuple[View, ...]

    @classmethod
    def of(cls, views: Iterable[tuple[Device, VTensor]]) -> Side:
        """The end that these parts of one op make."""
        pairs = list(views)
        numbers = {s: i for i, s in enumerate(sorted({view.summand for _, view in pairs}))}
        found = {View(device, view.box, numbers[view.summand]) for device, view in pairs}
        return cls(len(numbers), tuple(sorted(found)))

    @classmethod
    def joined(cls, sides: Iterable[Side]) -> Side:
        """Several readers of one tensor, whose gradients are summed."""
        views: list[View] = []
        base = 0
        for side in sides:
            views += [View(v.device, v.box, base + v.summand) for v in side.views]
            base += side.num_summands
        return cls(base, tuple(sorted(views)))

    @cached_property
    def shards(self) -> Mapping[Device, Shard]:
        """What each device holds, as one box."""
        found: dict[Device, list[View]] = {}
        for view in self.views:
            found.setdefault(view.device, []).append(view)
        return {device: Shard.of(views) for device, views in found.items()}

    @cached_property
    def held(self) -> tuple[tuple[rv.Box, int], ...]:
        """All distinct boxes and summands; those of one summand are disjoint."""
        return tuple(sorted({(view.box, view.summand) for view in self.views}))

    def summands_at(self, cell: rv.Box) -> frozenset[int]:
        """The summands that make up the value of a cell that no view's edge cuts."""
        return frozenset(summand for box, summand in self.held if box.contains(cell))

    @cached_property
    def whole(self) -> Side:
        """The same boxes, each with all of its value: what is read, or what a gradient gets."""
        if self.num_summands == 1:
            return self
        views = {View(v.device, v.box, 0) for v in self.views}
        return Side(1, tuple(sorted(views)))

    @cached_property
    def resident(self) -> Side:
        """What each device holds as one box, with all of its value."""
        views = [View(device, shard.box, 0) for device, shard in self.shards.items()]
        return Side(1, tuple(sorted(views)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.num_summands, self.views))


@dataclass(frozen=True, slots=True)
class Shard:
    """What one device holds of a tensor: the least box around its views.

    Elements of the box that no view covers are zero in a sum, and are never read otherwise.
    """

    box: rv.Box
    held: frozenset[tuple[rv.Box, int]]

    @classmethod
    def of(cls, views: Iterable[View]) -> Shard:
        """Around these views of one device."""
        held = frozenset((view.box, view.summand) for view in views)
        return cls(bounding(box for box, _ in held), held)

    @property
    def summands(self) -> frozenset[int]:
        """All of which it holds something."""
        return frozenset(summand for _, summand in self.held)

    def summands_at(self, cell: rv.Box) -> frozenset[int]:
        """The summands that are held of all of a cell."""
        return frozenset(summand for box, summand in self.held if box.contains(cell))


def bounding(boxes: Iterable[rv.Box]) -> rv.Box:
    """The least box that contains all."""
    given = list(boxes)
    return rv.Box(
        tuple(map(min, *(box.lo for box in given))) if len(given) > 1 else given[0].lo,
        tuple(map(max, *(box.hi for box in given))) if len(given) > 1 else given[0].hi,
    )
