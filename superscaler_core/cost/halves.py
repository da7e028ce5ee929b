"""Halves: the times of I and W, the two halves of a segment's backward."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.graph import Op
from superscaler_core.program.halves import HalvesOfOp, halves_of

BOTH = 0.5
"""Share of W in the backward of an op with gradients of inputs and of weights. Both are taken to be
equally long, as the two products of a linear layer are."""


def halves(ops: Sequence[Op]) -> tuple[tuple[float, float], ...]:
    """The shares of I and W in the backward of every part of a segment.

    Args:
        ops: ops of the parts, in order; the segment has a backward.
    """
    return tuple(map(_shares, halves_of(ops)))


def _shares(halves: HalvesOfOp) -> tuple[float, float]:
    if halves.inputs and halves.weights:
        return 1 - BOTH, BOTH
    return float(bool(halves.inputs)), float(bool(halves.weights))
