"""View: a tensor whose dims are split into several dims each, so that strided regions are boxes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from rvdcomm.errors import LayoutError
from rvdcomm.layout.box import MAX_DIMS, Box
from rvdcomm.text import MAX_DIGITS, quoted

MAX_VIEW_CHARS = MAX_DIMS * (MAX_DIGITS + 2)
"""The most characters that the text of a view may have."""

_SIZE = f"[0-9]{{1,{MAX_DIGITS}}}"
_FORM = re.compile(rf"(?:\({_SIZE}(?:,{_SIZE})*\))+")


@dataclass(frozen=True)
class View:
    """A view of a tensor, in which dim d is split into dims of sizes ``parts[d]``, outermost first.

    Every fourth row of a matrix of 12 rows is the box ``[0:3,1:2,0:5]`` of the view
    ``(3,4)(5)``. Row-major order is the same in a view as in the tensor.

    Laws (tests/layout/test_view.py): ``View.parse(str(x)) == x``; ``box`` has the elements of the
    tensor's box, in the same order; ``strides`` address the same elements as the tensor's strides.

    Raises:
        LayoutError: the view has too many dims, or several parts for a dim of size 0.
    """

    parts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.num_dims > MAX_DIMS or any(len(s) > 1 and 0 in s for s in self.parts):
            raise LayoutError(
                f"dims {quoted(str(self))}: at most {MAX_DIMS}, and none of an empty dim in parts."
            )

    @classmethod
    def whole(cls, shape: Iterable[int]) -> View:
        """The view in which no dim is split."""
        return cls(tuple((size,) for size in shape))

    @cached_property
    def is_whole(self) -> bool:
        """Whether no dim is split."""
        return all(len(sizes) == 1 for sizes in self.parts)

    @property
    def num_dims(self) -> int:
        """Number of dims of the view."""
        return sum(map(len, self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor's dims."""
        return tuple(map(prod, self.parts))

    def box(self, box: Box) -> Box:
        """A box of the tensor as a box of the view.

        Raises:
            LayoutError: the region is not one box of the view.
        """
        if self.is_whole:
            return box
        found = [
            span
            for sizes, low, high in zip(self.parts, box.lo, box.hi, strict=True)
            for span in _spans(sizes, low, high)
        ]
        return Box(tuple(low for low, _ in found), tuple(high for _, high in found))

    def check_cuts(self, cuts: Sequence[Sequence[int]]) -> None:
        """Raise a LayoutError if a piece between two cut points of a dim is no box of the view."""
        for sizes, cut in zip(self.parts, cuts, strict=True):
            for low, high in pairwise(cut):
                _spans(sizes, low, high)

    def strides(self, strides: Sequence[int], box: Box) -> tuple[int, ...]:
        """Strides in this view of the shard ``box``, given its strides in the tensor's dims."""
        found: list[int] = []
        for sizes, stride, low, high in zip(self.parts, strides, box.lo, box.hi, strict=True):
            of_dim = []
            for first, last in reversed(_spans(sizes, low, high)):
                of_dim.append(stride)
                stride *= last - first
            found += reversed(of_dim)
        return tuple(found)

    def __str__(self) -> str:
        return "".join(f"({','.join(map(str, sizes))})" for sizes in self.parts)

    @classmethod
    def parse(cls, text: str) -> View:
        """Read the text that ``str`` writes, such as ``(3,4)(5)``."""
        if len(text) > MAX_VIEW_CHARS or _FORM.fullmatch(text) is None:
            raise LayoutError(f"cannot parse dims {quoted(text)}: expected the form '(3,4)(5)'.")
        parts = (map(int, sizes.split(",")) for sizes in text[1:-1].split(")("))
        return cls(tuple(map(tuple, parts)))


def _spans(sizes: Sequence[int], low: int, high: int) -> list[tuple[int, int]]:
    """A range of a dim, written as one range per part of the dim."""
    found: list[tuple[int, int]] = []
    for i in range(len(sizes)):
        inner = prod(sizes[i + 1 :])
        if i == len(sizes) - 1 or low % inner == high % inner == 0:
            return [*found, (low // inner, high // inner), *((0, n) for n in sizes[i + 1 :])]
        index, low = divmod(low, inner)
        high -= index * inner
        if high > inner:
            raise LayoutError(f"{low}:{high} is no box of the parts {tuple(sizes)}.")
        found.append((index, index + 1))
    return found
