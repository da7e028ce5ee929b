"""Sums: which gradients of weights a backward adds to gradients that are there already."""

from __future__ import annotations

from superscaler_core.graph.tensor import PARAMETER, VTensor
from superscaler_core.plan import Device
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.weights import Use


class Sums:
    """Follows one backward of a stage.

    A window's gradients are taken away at its end, so they meet none of other microbatches.

    Args:
        made: the plan.
        is_first: whether no other microbatch had its backward.
    """

    def __init__(self, made: Materialized, is_first: bool) -> None:
        self._made, self._is_first = made, is_first
        self._begun: set[tuple[Device, Use]] = set()

    def of(self, device: Device, segment: Segment) -> list[VTensor]:
        """The gradients that a segment adds up; to be asked in the order of the backward."""
        found = []
        for part in reversed(segment.parts):
            for position, view in enumerate(part.inputs):
                if view.tensor.kind != PARAMETER or not view.tensor.requires_grad:
                    continue
                use = self._made.weights.of_reader[part.op, position]
                is_new = self._is_first or use.window is not None
                if (device, use) in self._begun or not is_new:
                    found.append(view)
                self._begun.add((device, use))
        return found
