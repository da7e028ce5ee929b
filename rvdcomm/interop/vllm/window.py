"""Window: which elements of a whole tensor a view of it sees, as steps in the tensor's dims.

A loader that is recorded takes views of checkpoint tensors: ``narrow``, ``view``, ``transpose``,
``chunk``. All of them are addresses in the whole tensor. A window says the same without the whole
tensor, so that the view can be taken of a box of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

from torch import Tensor

from rvdcomm import Box, LayoutError


@dataclass(frozen=True)
class Window:
    """The elements that a view sees: ``box`` is the least box of the tensor that has them all.

    ``sizes`` are the extents of the view's dims, each maybe split in several; ``shape`` is the
    view's shape. ``steps[j]`` is ``(d, k)``: a step along size j goes k indices along dim d of the
    tensor; k is 0 for a dim that repeats its elements.

    Law (tests/interop/vllm/test_window.py): ``Window.of(view of x).read(x[box], box)`` equals the
    view, for any box that contains ``window.box``.
    """

    box: Box
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, whole: Sequence[int], shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> Window:
        """The window of a view, given its address in a contiguous tensor of shape ``whole``.

        Args:
            whole: shape of the tensor, in elements.
            shape, strides, offset: of the view, in elements.

        Raises:
            LayoutError: the view is no set of steps along dims of the tensor.
        """
        if 0 in shape:
            nothing = Box((0,) * len(whole), (0,) * len(whole))
            return cls(nothing, tuple(shape), tuple(shape), ((0, 0),) * len(shape))
        inner = (*accumulate(reversed(whole[1:]), mul, initial=1),)[::-1][: len(whole)]
        low = _coordinates(offset, inner)
        high = list(low)
        sizes: list[int] = []
        steps: list[tuple[int, int]] = []
        for size, stride in zip(shape, strides, strict=True):
            for count, d, k in _split(size, stride, whole, inner, low):
                sizes.append(count)
                steps.append((d, k))
                if k:
                    high[d] += (count - 1) * k
        if any(h >= n for h, n in zip(high, whole, strict=True)):
            raise LayoutError(
                f"a view of shape {tuple(shape)}, strides {tuple(strides)} and offset {offset} "
                f"of a tensor of shape {tuple(whole)} goes beyond an end of a dim."
            )
        box = Box(tuple(low), tuple(h + 1 for h in high))
        return cls(box, tuple(shape), tuple(sizes), tuple(steps))

    @property
    def num_elements(self) -> int:
        """Elements of the tensor that the view sees, each counted once."""
        return prod(n for n, (_, k) in zip(self.sizes, self.steps, strict=True) if k or n == 0)

    def read(self, held: Tensor, box: Box) -> Tensor:
        """The view, of a tensor that holds ``box`` of the whole one; copied only if it has to be.

        Raises:
            LayoutError: ``box`` lacks an element of the view.
        """
        if 0 in self.shape:
            return held.new_empty(self.shape)
        if not box.contains(self.box):
            raise LayoutError(f"the view sees {self.box}, and {box} is held.")
        start = held.storage_offset() + sum(
            (low - base) * stride
            for low, base, stride in zip(self.box.lo, box.lo, held.stride(), strict=True)
        )
        strides = [k * held.stride(d) if k else 0 for d, k in self.steps]
        return held.as_strided(self.sizes, strides, start).reshape(self.shape)


def _coordinates(offset: int, inner: Sequence[int]) -> list[int]:
    found = []
    for stride in inner:
        index, offset = divmod(offset, stride)
        found.append(index)
    return found


def _split(
    size: int, stride: int, whole: Sequence[int], inner: Sequence[int], low: Sequence[int]
) -> list[tuple[int, int, int]]:
    """A dim of the view as ``(count, d, k)``, outermost first: one, unless it joins dims."""
    if size == 1 or stride == 0:
        return [(size, 0, 0)]
    # The innermost dim of the tensor along which the stride steps; dims of one index have none.
    found = next(
        (
            d
            for d in range(len(whole))
            if whole[d] > 1 and stride % inner[d] == 0 and stride // inner[d] < whole[d]
        ),
        None,
    )
    if found is None:
        raise LayoutError(
            f"a stride of {stride} is no step along a dim of a tensor of shape {tuple(whole)}."
        )
    step = stride // inner[found]
    room = -(-(whole[found] - low[found]) // step)
    if size <= room:
        return [(size, found, step)]
    # The view joins this dim with the one outside of it, as ``flatten`` does.
    count = whole[found] // step
    if low[found] >= step or whole[found] % step or size % count:
        raise LayoutError(
            f"a view of {size} elements with stride {stride} does not follow the dims of a tensor "
            f"of shape {tuple(whole)}."
        )
    outer = _split(size // count, count * stride, whole, inner, low)
    return [*outer, (count, found, step)]
