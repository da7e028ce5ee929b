"""Side: who writes a tensor, or who reads it; either end of a data dependency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import rvdcomm as rv
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.tensor import Summand
from superscaler_core.plan import Device, OpSplit

MAX_SIDES = 1 << 16
"""Ends that are remembered: of a form of ops with one split, or of one list of readers."""


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
    def of(cls, views: Iterable[tuple[Device, rv.Box, Summand]]) -> Side:
        """The end that these parts of one op make."""
        given = list(views)
        numbers = {s: i for i, s in enumerate(sorted({summand for _, _, summand in given}))}
        found = {View(device, box, numbers[summand]) for device, box, summand in given}
        return cls(len(numbers), tuple(sorted(found)))

    @staticmethod
    def joined(sides: Iterable[Side]) -> Side:
        """Several readers of one tensor, whose gradients are summed."""
        return _joined(tuple(sides))

    @staticmethod
    def everyone(devices: Iterable[Device], shape: tuple[int, ...]) -> Side:
        """The end at which devices all hold all of a tensor."""
        return _everyone(tuple(sorted(devices)), shape)

    @cached_property
    def shards(self) -> Mapping[Device, Shard]:
        """What each device holds, as one box."""
        found: dict[Device, list[View]] = {}
        for view in self.views:
            found.setdefault(view.device, []).append(view)
        return {device: Shard.of(views) for device, views in found.items()}

    @cached_property
    def num_elements(self) -> Mapping[Device, int]:
        """Of what each device holds."""
        return {device: shard.box.num_elements for device, shard in self.shards.items()}

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


@lru_cache(maxsize=MAX_SIDES)
def _everyone(devices: tuple[Device, ...], shape: tuple[int, ...]) -> Side:
    box = rv.Box.of_shape(shape)
    return Side(1, tuple(View(device, box, 0) for device in devices))


@lru_cache(maxsize=MAX_SIDES)
def _joined(sides: tuple[Side, ...]) -> Side:
    views: list[View] = []
    base = 0
    for side in sides:
        views += [View(v.device, v.box, base + v.summand) for v in side.views]
        base += side.num_summands
    return Side(base, tuple(sorted(views)))


@dataclass(frozen=True, slots=True)
class OpSides:
    """The ends that an op makes: where it reads every input, and where it writes every output."""

    inputs: tuple[Side, ...]
    outputs: tuple[Side, ...]


@lru_cache(maxsize=MAX_SIDES)
def sides_of(form: OpForm, split: OpSplit) -> OpSides:
    """The ends of an op of a form that is split so; every part has a device."""
    placed = [(part.device, form.part(part.pieces)) for part in split.parts]
    assert all(device is not None for device, _ in placed), f"{split}; validate comes before"
    return OpSides(
        tuple(
            Side.of((device, *part.inputs[i]) for device, part in placed if device is not None)
            for i in range(len(form.inputs))
        ),
        tuple(
            Side.of((device, *part.outputs[i]) for device, part in placed if device is not None)
            for i in range(len(form.outputs))
        ),
    )


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
