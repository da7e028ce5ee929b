"""Join: one tensor from pieces that each hold a box of it; overlapping pieces add up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import rvdcomm as rv


def join(box: str, pieces: Sequence[tuple[Tensor, str]]) -> Tensor:
    """The sum, in a box, of tensors that each hold some of it; differentiable.

    Args:
        box: the box of the result, such as ``"[0:4,2:8]"``.
        pieces: each with the box that it holds; what lies outside ``box`` is left out.

    Returns:
        Tensor of the box's shape, of the dtype and device of the first piece.
    """
    whole = rv.Box.parse(box)
    result = pieces[0][0].new_zeros(whole.shape)
    for tensor, text in pieces:
        held = rv.Box.parse(text)
        common = whole.intersect(held)
        if common is not None:
            result[common.slices_within(whole)] += tensor[common.slices_within(held)]
    return result
