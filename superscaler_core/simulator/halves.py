"""Halves: the times of I and W, of which the backward of a segment is made."""

from __future__ import annotations

from collections.abc import Callable

from superscaler_core.graph.part import Part
from superscaler_core.program.halves import Sides, sides_of
from superscaler_core.program.segments import Segment

BOTH = 0.5
"""Share of W in the backward of an op that has gradients for either: it computes as much for each,
as a linear layer does with its two products."""


def halves(segment: Segment, backward_secs: Callable[[Part], float]) -> tuple[float, float]:
    """The times of I and W of a segment; together they are that of its whole backward.

    Args:
        segment: which has a backward.
        backward_secs: of a part, for all its gradients.
    """
    inputs_secs = weights_secs = 0.0
    for sides in sides_of(segment):
        secs, share = backward_secs(sides.part), _weights_share(sides)
        inputs_secs += secs * (1 - share)
        weights_secs += secs * share
    return inputs_secs, weights_secs


def _weights_share(sides: Sides) -> float:
    if not sides.weights:
        return 0.0
    return BOTH if sides.inputs else 1.0
