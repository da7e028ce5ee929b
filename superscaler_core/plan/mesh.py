"""Mesh: devices as a grid with named axes, such as ``x:2,y:4``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from superscaler_core.errors import PlanError
from superscaler_core.graph.shard_spec import Axes
from superscaler_core.plan.op_split import OpSplit
from superscaler_core.plan.plan import Device


@dataclass(frozen=True)
class Mesh:
    """The axes of a grid of devices, outermost first, independent of which devices they are.

    Laws (tests/superscaler_core/plan/test_mesh.py): ``Mesh.parse(str(x)) == x``; the
    parts of a split tile the loops that it cuts.

    >>> mesh = Mesh.parse("x:2,y:2")
    >>> print(mesh.split({"b": 4, "n": 6}, {"b": ("x",)}, range(4)))
    0 b[0:2]; 1 b[0:2] copy:1; 2 b[2:4]; 3 b[2:4] copy:1

    Attributes:
        axes: name and number of devices of every axis.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names or len(set(names)) < len(names) or any(num < 1 for _, num in self.axes):
            raise PlanError(
                f"mesh {str(self)!r}: it has to have axes of distinct names, each of at least one "
                "device, such as x:2,y:4."
            )

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The number of devices along every axis."""
        return dict(self.axes)

    @property
    def num_devices(self) -> int:
        """The number of devices of the whole grid."""
        return self.num_pieces(tuple(self.sizes))

    def num_pieces(self, axes: Axes) -> int:
        """The number of pieces into which these axes together cut a loop."""
        return prod(self.sizes[axis] for axis in axes)

    def split(
        self, sizes: Mapping[str, int], cuts: Mapping[str, Axes], devices: Sequence[Device]
    ) -> OpSplit:
        """Cut loops along axes, as evenly as possible; replicate along all other axes.

        Args:
            sizes: iterations of every loop.
            cuts: the axes along which each loop is cut; an axis cuts one loop at most.
            devices: the last axis varies fastest.
        """
        parts = []
        copies: dict[tuple[tuple[str, int, int], ...], int] = {}
        places = product(*(range(num) for _, num in self.axes))
        for device, place in zip(devices, places, strict=True):
            at = dict(zip(self.sizes, place, strict=True))
            pieces = []
            for loop, axes in sorted(cuts.items()):
                number, num, size = 0, self.num_pieces(axes), sizes[loop]
                for axis in axes:
                    number = number * self.sizes[axis] + at[axis]
                if num > 1:
                    pieces.append((loop, size * number // num, size * (number + 1) // num))
            mine = tuple(pieces)
            parts.append((mine, copies.setdefault(mine, 0), device))
            copies[mine] += 1
        return OpSplit.of(parts)

    def __str__(self) -> str:
        return ",".join(f"{name}:{num}" for name, num in self.axes)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read the text that ``str`` writes; semicolons may stand for commas.

        Raises:
            PlanError: the text has another form.
        """
        words = [word.strip() for word in re.split("[,;]", text)]
        found = [re.fullmatch(r"([A-Za-z_]\w*)\s*:\s*(\d+)", word) for word in words]
        if not all(found):
            raise PlanError(f"cannot parse mesh {text!r}: expected NAME:DEVICES, such as x:2,y:4.")
        return cls(tuple((word[1], int(word[2])) for word in found if word))
