"""Forms of a model's tensors on equal devices in one group, in HiDup's words.

A written tensor is ``Full`` (whole on every device), ``Gather(d)`` (every device has a piece along
dim d) or ``Reduce`` (a partial sum). A tensor that is read whole is ``Full`` if every device
computes the same with it, and ``Replicate`` if the devices compute different pieces; its gradient
is then a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from superscaler_core.materialize.sharding import Sharding

FULL, REDUCE, REPLICATE = "Full", "Reduce", "Replicate"


def gather(dim: int) -> str:
    """The form in which every device has a piece along a dim.

    >>> gather(0)
    'Gather(0)'
    """
    return f"Gather({dim})"


def is_gather(form: str) -> bool:
    """Whether a form is ``Gather``: every device has a piece."""
    return form.startswith("Gather")


def form_of(side: Sharding, shape: Sequence[int], *, is_read: bool) -> str:
    """The form of one end of a tensor (writers or readers); ends of one form have equal boxes.

    Args:
        side: what all devices write, or read.
        shape: shape of the tensor.
        is_read: whether it is read; otherwise it is written.
    """
    boxes = [side.shards[device].box for device in sorted(side.shards)]
    distinct = set(boxes)
    cut = [d for d, size in enumerate(shape) if any(box.shape[d] < size for box in distinct)]
    if not cut:
        return FULL if side.num_summands == 1 else REPLICATE if is_read else REDUCE
    pieces = sorted((box.lo[cut[0]], box.hi[cut[0]]) for box in boxes)
    tile = pieces[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(pieces))
    if len(cut) == 1 and tile and side.num_summands == 1:
        return gather(cut[0])
    return f"Other({'; '.join(map(str, boxes))}; {side.num_summands} summands)"
