"""Sliding window: a dim that is read through a window which slides along a loop of the output."""

from __future__ import annotations

import re
from dataclasses import dataclass

from superscaler_core.errors import AnnotationError

PATTERN = r"[A-Za-z_][A-Za-z0-9_.]*(?:(?:\*\d+)?-\d+\+\d+|\*\d+)"
"""Regular expression of the text of a window, such as ``y*2-1+1``."""

_PARTS = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*)(?:\*(\d+))?(?:-(\d+)\+(\d+))?")


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A window: iteration ``y`` reads indices ``y * stride + first`` to ``y * stride + last``.

    Windows may reach over the ends of the tensor, where the op pads. Indices between two windows
    are read with the first of the two, and indices after the last window with the last window.

    Laws (tests/superscaler_core/graph/test_sliding.py): ``SlidingWindow.parse(str(x)) == x``; runs
    of iterations that tile the loop read runs of indices that cover the dim, and tile it if
    ``overlap`` is 0; neighbouring runs have ``overlap`` indices in common, fewer at the dim's ends.

    >>> window = SlidingWindow.parse("y*2-1+1")
    >>> window.reads(2, 4, of=5, size=9), window.overhang(2, 5, size=9)
    ((3, 8), (0, 1))
    """

    loop: str
    stride: int = 1
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        if self.stride < 1 or not self.first <= 0 <= self.last:
            raise AnnotationError(
                f"sliding window {self}: the stride is at least 1, and iteration i reads index "
                "i * stride at least: the first offset is -0 or less, the second +0 or more."
            )

    @property
    def overlap(self) -> int:
        """Number of indices that two neighbouring windows have in common."""
        return max(0, self.last - self.first + 1 - self.stride)

    def reads(self, start: int, stop: int, *, of: int, size: int) -> tuple[int, int]:
        """The indices ``[lo, hi)`` that iterations ``[start, stop)`` out of ``of`` read."""
        end = max((stop - 1) * self.stride + self.last + 1, stop * self.stride + self.first)
        return max(0, start * self.stride + self.first), size if stop == of else min(end, size)

    def overhang(self, start: int, stop: int, *, size: int) -> tuple[int, int]:
        """Elements by which windows ``[start, stop)`` reach over both ends of the dim."""
        before = -(start * self.stride + self.first)
        after = (stop - 1) * self.stride + self.last + 1 - size
        return max(0, before), max(0, after)

    def fits(self, of: int, size: int) -> bool:
        """Whether ``of`` windows fit the dim: the last begins in it, one more would end outside.

        So each window reads at least one index, and the remainder is less than a stride.
        """
        return (of - 1) * self.stride + self.first < size <= of * self.stride + self.last

    def __str__(self) -> str:
        stride = f"*{self.stride}" if self.stride != 1 else ""
        # Windows reach back, so a first offset of zero is written -0.
        is_point = self.first == self.last == 0 and stride
        return self.loop + stride + ("" if is_point else f"-{-self.first}+{self.last}")

    @classmethod
    def parse(cls, text: str) -> SlidingWindow:
        """Read the text that ``str`` writes.

        Raises:
            AnnotationError: the text is not a window.
        """
        found = _PARTS.fullmatch(text)
        if found is None or found[0] == found[1]:
            raise AnnotationError(f"{text!r} is no sliding window; one is 'y*2-1+1' or 'y-1+1'.")
        loop, stride, first, last = found.groups()
        return cls(loop, int(stride or 1), -int(first or 0), int(last or 0))
