"""OpSplit: how an op is cut and on which devices its parts run, independent of the op itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part, Piece
from superscaler_core.plan.decisions import PlacedPart

MAX_SPLITS = 1 << 16
"""Bound on cached splits. The cache interns them: equal splits are one object."""


MAX_PARTS = 1 << 13
"""Bound on cached parts of ops: the splits of some plans of a deep model."""


@dataclass(frozen=True)
class OpSplit:
    """The parts of an op, each with its device. Ops of the same form can share a split.

    Laws (tests/superscaler_core/plan/test_op_split.py): interned splits that are equal are one
    object; ``plan.op_split(op)`` agrees with ``plan.decisions`` about the op.

    >>> split = OpSplit.grid({"b": 8, "n": 6}, range(4), [("b", 2), ("n", 2)])
    >>> print(split)
    0 b[0:4] n[0:3]; 1 b[0:4] n[3:6]; 2 b[4:8] n[0:3]; 3 b[4:8] n[3:6]

    Attributes:
        parts: pieces, replica and device of each part, in the plan's order.
    """

    parts: tuple[PlacedPart, ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[tuple[Piece, ...], int, int | None]]) -> OpSplit:
        """The split whose parts have these pieces, replicas and devices."""
        return _interned(tuple(parts))

    @classmethod
    def grid(
        cls,
        sizes: Mapping[str, int],
        devices: Sequence[int],
        axes: Sequence[tuple[str | None, int]],
    ) -> OpSplit:
        """Cut loops along the axes of a grid of devices, as evenly as possible.

        Args:
            sizes: number of iterations of every loop, as in ``Op.sizes``.
            devices: devices of the grid; the last axis varies fastest.
            axes: for each axis the loop that it cuts (None to replicate), and its number of
                devices. A loop may be cut along several axes, in their order.

        Raises:
            PlanError: the axes do not use exactly the given devices; or a loop is unknown, or has
                fewer iterations than pieces.
        """
        count = prod(num for _, num in axes)
        if count != len(devices):
            text = " x ".join(str(num) for _, num in axes)
            raise PlanError(f"a grid of {text} has {count} devices, but {len(devices)} were given.")
        counts: dict[str, int] = {}
        for loop, num in axes:
            if loop is not None and num > 1:
                counts[loop] = counts.get(loop, 1) * num
        for loop, num in counts.items():
            if not num <= sizes.get(loop, 0):
                known = ", ".join(f"{name} of {size}" for name, size in sizes.items())
                raise PlanError(
                    f"loop {loop} cut into {num}: it has to be one of {known}, and as long as that."
                )
        parts = []
        for index, device in zip(product(*(range(num) for _, num in axes)), devices, strict=True):
            places, replica = dict.fromkeys(counts, 0), 0
            for (loop, num), place in zip(axes, index, strict=True):
                if loop in places:
                    places[loop] = places[loop] * num + place
                else:
                    replica = replica * num + place
            pieces = (
                (
                    loop,
                    sizes[loop] * place // counts[loop],
                    sizes[loop] * (place + 1) // counts[loop],
                )
                for loop, place in places.items()
            )
            parts.append((tuple(sorted(pieces)), replica, device))
        return cls.of(parts)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices that run a part, ascending."""
        return tuple(sorted({part.device for part in self.parts if part.device is not None}))

    @cached_property
    def is_placed(self) -> bool:
        """Whether every part has a device."""
        return all(part.device is not None for part in self.parts)

    @cached_property
    def places(self) -> Mapping[tuple[tuple[Piece, ...], int], int | None]:
        """The device of every part, by its pieces and replica."""
        return {(part.pieces, part.replica): part.device for part in self.parts}

    def placed(self, devices: tuple[int | None, ...]) -> OpSplit:
        """The same parts on these devices, in the order of the parts."""
        return _placed(self, devices)

    def on(self, devices: Sequence[int]) -> OpSplit:
        """The same split; its devices, in ascending order, become the first of ``devices``.

        Raises:
            PlanError: ``devices`` has fewer devices than the split.
        """
        if len(devices) < len(self.devices):
            raise PlanError(
                f"split {self} on devices {list(devices)}: it has {len(self.devices)} devices."
            )
        places = dict(zip(self.devices, devices, strict=False))
        moved = (
            replace(p, device=places.get(p.device)) for p in self.parts if p.device is not None
        )
        return OpSplit.of((p.pieces, p.replica, p.device) for p in moved)

    def __str__(self) -> str:
        return "; ".join(map(str, self.parts))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.parts)


@lru_cache(maxsize=MAX_PARTS)
def parts_of(op: Op, split: OpSplit) -> tuple[Part, ...]:
    """The parts of an op with this split; plans that have the same split share them."""
    return tuple(Part(op, placed.pieces, placed.replica) for placed in split.parts)


@lru_cache(maxsize=MAX_PARTS)
def parts_by_device(op: Op, split: OpSplit) -> Mapping[int, tuple[Part, ...]]:
    """The parts of an op with this split that run on each device."""
    found: dict[int, tuple[Part, ...]] = {}
    for part, placed in zip(parts_of(op, split), split.parts, strict=True):
        if placed.device is not None:
            found[placed.device] = (*found.get(placed.device, ()), part)
    return found


@lru_cache(maxsize=MAX_SPLITS)
def _placed(split: OpSplit, devices: tuple[int | None, ...]) -> OpSplit:
    pairs = zip(split.parts, devices, strict=True)
    return OpSplit.of((part.pieces, part.replica, device) for part, device in pairs)


@lru_cache(maxsize=MAX_SPLITS)
def _interned(parts: tuple[tuple[tuple[Piece, ...], int, int | None], ...]) -> OpSplit:
    return OpSplit(tuple(PlacedPart(*part) for part in parts))
