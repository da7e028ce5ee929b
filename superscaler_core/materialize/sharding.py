"""Sharding: one end of a data dependency: all writers of a tensor, or all its readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import rvdcomm as rv
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.tensor import Summand
from superscaler_core.plan import Device, OpSplit

MAX_SHARDINGS = 1 << 16
"""Bound on cached ends: of an op form with one split, or of one list of readers."""


@dataclass(frozen=True, slots=True, order=True)
class HeldBox:
    """The box of a tensor that one device writes or reads, and the number of its summand.

    For a written tensor the summands add up to its value. For a read tensor the summands of its
    gradient are the gradients of its readers.
    """

    device: Device
    box: rv.Box
    summand: int


@dataclass(frozen=True)
class Sharding:
    """All views of one end. Equal ends are equal objects, because views are stored canonically.

    Laws (tests/superscaler_core/materialize/test_transfer.py): summands are numbered from 0 to
    ``num_summands - 1``; the order in which views are given does not matter.
    """

    num_summands: int
    views: tuple[HeldBox, ...]

    @classmethod
    def of(cls, views: Iterable[tuple[Device, rv.Box, Summand]]) -> Sharding:
        """The end formed by these views of one op's parts."""
        given = list(views)
        numbers = {s: i for i, s in enumerate(sorted({summand for _, _, summand in given}))}
        found = {HeldBox(device, box, numbers[summand]) for device, box, summand in given}
        return cls(len(numbers), tuple(sorted(found)))

    @staticmethod
    def joined(shardings: Iterable[Sharding]) -> Sharding:
        """The end of several readers of one tensor, whose gradients are summed."""
        return _joined(tuple(shardings))

    @staticmethod
    def everyone(devices: Iterable[Device], shape: tuple[int, ...]) -> Sharding:
        """The end at which each device holds the whole tensor."""
        return _everyone(tuple(sorted(devices)), shape)

    @cached_property
    def shards(self) -> Mapping[Device, Shard]:
        """The shard of each device: its views as one box."""
        found: dict[Device, list[HeldBox]] = {}
        for view in self.views:
            found.setdefault(view.device, []).append(view)
        return {device: Shard.of(views) for device, views in found.items()}

    @cached_property
    def num_elements(self) -> Mapping[Device, int]:
        """The number of elements that each device holds."""
        return {device: shard.box.num_elements for device, shard in self.shards.items()}

    def shape_on(self, device: Device) -> tuple[int, ...] | None:
        """The shape of what a device holds; None if it holds nothing."""
        shard = self.shards.get(device)
        return None if shard is None else shard.box.shape

    @cached_property
    def held(self) -> tuple[tuple[rv.Box, int], ...]:
        """All distinct boxes with their summands; boxes of one summand are disjoint."""
        return tuple(sorted({(view.box, view.summand) for view in self.views}))

    def summands_at(self, cell: rv.Box) -> frozenset[int]:
        """The summands of a cell's value; no box of a view cuts the cell."""
        return frozenset(summand for box, summand in self.held if box.contains(cell))

    @cached_property
    def whole(self) -> Sharding:
        """The same boxes with the full value: for reads, or for the result of summing."""
        if self.num_summands == 1:
            return self
        views = {HeldBox(v.device, v.box, 0) for v in self.views}
        return Sharding(1, tuple(sorted(views)))

    @cached_property
    def resident(self) -> Sharding:
        """What each device holds, as one box with the full value."""
        views = [HeldBox(device, shard.box, 0) for device, shard in self.shards.items()]
        return Sharding(1, tuple(sorted(views)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.num_summands, self.views))


@lru_cache(maxsize=MAX_SHARDINGS)
def _everyone(devices: tuple[Device, ...], shape: tuple[int, ...]) -> Sharding:
    box = rv.Box.of_shape(shape)
    return Sharding(1, tuple(HeldBox(device, box, 0) for device in devices))


@lru_cache(maxsize=MAX_SHARDINGS)
def _joined(shardings: tuple[Sharding, ...]) -> Sharding:
    views: list[HeldBox] = []
    base = 0
    for sharding in shardings:
        views += [HeldBox(v.device, v.box, base + v.summand) for v in sharding.views]
        base += sharding.num_summands
    return Sharding(base, tuple(sorted(views)))


@dataclass(frozen=True, slots=True)
class OpShardings:
    """The ends of an op: where it reads each input, and where it writes each output."""

    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]


@lru_cache(maxsize=MAX_SHARDINGS)
def shardings_of(form: OpForm, split: OpSplit) -> OpShardings:
    """The ends of an op with this form and split; every part must have a device."""
    placed = [(part.device, form.part(part.pieces)) for part in split.parts]
    assert all(device is not None for device, _ in placed), f"{split}; validate comes before"
    return OpShardings(
        tuple(
            Sharding.of((device, *part.inputs[i]) for device, part in placed if device is not None)
            for i in range(len(form.inputs))
        ),
        tuple(
            Sharding.of((device, *part.outputs[i]) for device, part in placed if device is not None)
            for i in range(len(form.outputs))
        ),
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one device holds: the smallest box around its views.

    Elements of the box outside all views are zero in a sum, and are otherwise never read.
    """

    box: rv.Box
    held: frozenset[tuple[rv.Box, int]]

    @classmethod
    def of(cls, views: Iterable[HeldBox]) -> Shard:
        """The shard around these views of one device."""
        held = frozenset((view.box, view.summand) for view in views)
        return cls(bounding(box for box, _ in held), held)

    @property
    def summands(self) -> frozenset[int]:
        """All summands of which the shard holds anything."""
        return frozenset(summand for _, summand in self.held)

    def summands_at(self, cell: rv.Box) -> frozenset[int]:
        """The summands that the shard holds for all of a cell."""
        return frozenset(summand for box, summand in self.held if box.contains(cell))


def bounding(boxes: Iterable[rv.Box]) -> rv.Box:
    """The smallest box that contains all boxes."""
    given = list(boxes)
    return rv.Box(
        tuple(map(min, *(box.lo for box in given))) if len(given) > 1 else given[0].lo,
        tuple(map(max, *(box.hi for box in given))) if len(given) > 1 else given[0].hi,
    )
