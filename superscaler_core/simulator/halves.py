"""Halves: the times of I and W, of which the backward of a segment is made."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.graph import Op
from superscaler_core.program.halves import Sides, sides_of

BOTH = 0.5
"""Share of W in the backward of an op that has gradients for either: it computes as much for each,
as a linear layer does with its two products."""


def halves(ops: Sequence[Op]) -> tuple[tuple[float, float], ...]:
    """The shares of I and W in the backward of every part of a segment.

    Args:
        ops: of the parts of a segment that has a backward, in order.
    """
    return tuple(map(_shares, sides_of(ops)))


def _shares(sides: Sides) -> tuple[float, float]:
    if sides.inputs and sides.weights:
        return 1 - BOTH, BOTH
    return float(bool(sides.inputs)), float(bool(sides.weights))
