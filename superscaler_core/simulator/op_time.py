"""Op time: what a part of an op takes forward and backward, by a table or by the roofline.

Roofline (Williams, Waterman, Patterson 2009): an op takes as long as its operations or its memory
traffic, whichever is longer. Operands are read and results written once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ITEM_BYTES, PARAMETER, VTensor
from superscaler_core.memory.held import SAVED_ITEM_BYTES, VIEWS
from superscaler_core.simulator.profile import DeviceProfile

BACKWARD_FLOPS = {"attention": 2.5}
"""Operations of the backward over those of the forward, where it is not the number of gradients.

Attention: five products where the forward has two (FlashAttention, Dao et al. 2022, recomputes the
scores).
"""

LOOK_UPS = frozenset({"embedding"})
"""Kinds of ops that read only those rows of a parameter that they return."""

ACCUMULATE = 3
"""Times that a weight's gradient is read or written to add it to what is there."""


def signature(part: Part) -> str:
    """What decides a part's time: its code, the shapes and dtypes, and whose gradients it gives.

    Where its iterations begin does not matter.
    """
    inputs = " ".join(
        _text(view) + ("'" if view.tensor.requires_grad else "") for view in part.inputs
    )
    outputs = " ".join(map(_text, part.outputs))
    sizes = ",".join(str(hi - lo) for lo, hi in map(part.range, part.op.sizes))
    return f"{part.op.code} | {inputs} -> {outputs} | {sizes}"


def _text(view: VTensor) -> str:
    return f"{view.tensor.dtype}{list(view.box.shape)}"


def _bytes(view: VTensor) -> int:
    return view.box.num_elements * ITEM_BYTES[view.tensor.dtype]


def forward_bytes(part: Part) -> int:
    """Memory traffic of the forward."""
    written = sum(map(_bytes, part.outputs))
    read = sum(
        written if part.op.kind in LOOK_UPS and view.tensor.kind == PARAMETER else _bytes(view)
        for view in part.inputs
    )
    return read + written


def backward_bytes(part: Part) -> int:
    """Memory traffic of the backward: what was saved, and gradients."""
    operands = (*part.inputs, *part.outputs)
    saved = sum(
        operands[i].box.num_elements * SAVED_ITEM_BYTES.get(part.op.kind, 0) or _bytes(operands[i])
        for i in part.op.saves
    )
    given = sum(_bytes(view) for view in part.outputs if view.tensor.requires_grad)
    wanted = [view for view in part.inputs if view.tensor.requires_grad]
    weights = [view for view in wanted if view.tensor.kind == PARAMETER]
    is_product = len(wanted) > len(weights) and part.op.kind not in LOOK_UPS
    again = sum(map(_bytes, weights)) if is_product else 0
    return saved + given + again + sum(map(_bytes, wanted))


def backward_flops(part: Part) -> float:
    """Operations of the backward: for every gradient that is wanted as many as the forward's."""
    wanted = sum(view.tensor.requires_grad for view in part.inputs)
    return forward_flops(part) * BACKWARD_FLOPS.get(part.op.kind, min(2, wanted))


def forward_flops(part: Part) -> float:
    """Operations of the forward."""
    return part.op.flops * part.volume


@dataclass
class OpTimes:
    """Times of parts on a device; equal parts are looked up once."""

    profile: DeviceProfile
    _found: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = field(default_factory=dict)

    def forward_secs(self, part: Part) -> float:
        """Of the forward."""
        return self._times(part)[0]

    def backward_secs(self, part: Part) -> float:
        """Of the backward, without a recomputation."""
        return self._times(part)[1]

    def sum_secs(self, grad: VTensor) -> float:
        """Of adding a weight's gradient to one that is there."""
        return ACCUMULATE * _bytes(grad) / self.profile.reached_bytes_per_sec

    def _times(self, part: Part) -> tuple[float, float]:
        key = part.op.index, tuple(hi - lo for lo, hi in map(part.range, part.op.sizes))
        if key not in self._found:
            self._found[key] = self._find(part)
        return self._found[key]

    def _find(self, part: Part) -> tuple[float, float]:
        if self.profile.op_secs:
            measured = self.profile.op_secs.get(signature(part))
            if measured is not None:
                return measured
        if part.op.kind in VIEWS:
            return 0.0, 0.0
        forward = self._roofline(part, forward_flops(part), forward_bytes(part))
        if not any(view.tensor.requires_grad for view in part.outputs):
            return forward, 0.0
        return forward, self._roofline(part, backward_flops(part), backward_bytes(part))

    def _roofline(self, part: Part, flops: float, num_bytes: int) -> float:
        dtype = part.outputs[0].tensor.dtype
        # Comparisons and counts compute nothing to speak of.
        computes = flops > 0 and dtype.startswith(("float", "bfloat"))
        flops_secs = flops / self.profile.flops_of(dtype, part.op.kind) if computes else 0.0
        bytes_secs = num_bytes / self.profile.reached_bytes_per_sec
        return max(flops_secs, bytes_secs) + self.profile.launch_secs
