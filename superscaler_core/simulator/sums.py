"""Sums: the gradients of weights that a backward adds to existing gradients."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Segment
from superscaler_core.materialize.weights import Use
from superscaler_core.plan import Device


class Sums:
    """Follows one backward of a stage, the first of its microbatches or a later one.

    An FSDP unit removes its gradients at its end, so they are not added to other microbatches'.
    """

    def __init__(self, made: Materialized, is_first: bool) -> None:
        self._made, self._is_first = made, is_first
        self._begun: set[tuple[Device, Use]] = set()

    def of(self, devices: Sequence[Device], segment: Segment) -> list[int]:
        """Bytes of the gradients that a segment accumulates; call in the order of the backward.

        The devices accumulate equally much; the segment is that of the first of them.
        """
        found = []
        for part in reversed(segment.parts):
            for position in part.op.form.trained:
                use = self._made.weights.of_reader[part.op, position]
                is_new = self._is_first or use.unit is not None
                if (devices[0], use) in self._begun or not is_new:
                    dtype = part.op.form.inputs[position].dtype
                    box, _ = part.form.inputs[position]
                    found.append(box.num_elements * ITEM_BYTES[dtype])
                self._begun |= {(device, use) for device in devices}
        return found
