"""Op time: the time of a part of an op forward and backward, from a table or by the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import rvdcomm as rv
from superscaler_core.cost.launches import Launches, launches_of
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.graph.form import MAX_PART_FORMS, OpForm, PartForm, TensorForm
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ITEM_BYTES, PARAMETER
from superscaler_core.known import remembers
from superscaler_core.materialize.halves import HalvesOfOp, halves_of
from superscaler_core.memory.held import SAVED_ITEM_BYTES, VIEWS

BACKWARD_FLOPS = {"attention": 2.5}
"""Operations of the backward divided by those of the forward; see ``backward_products`` for others.

Attention has five products where the forward has two (FlashAttention, Dao et al. 2022, recomputes
the scores).
"""

LOOK_UPS = frozenset({"embedding"})
"""Kinds of ops that read only the rows of a parameter that they return."""

ACCUMULATE = 3
"""Number of reads and writes of a weight's gradient when it is accumulated."""


BOTH = 0.5
"""Share of W in the backward of an op with gradients of inputs and of weights. Both are taken to be
equally long, as the two products of a linear layer are."""


def signature(part: Part) -> str:
    """A text of everything that decides a part's time: code, shapes, dtypes, needed gradients.

    Positions of its iterations do not matter.
    """
    return _signature(part.form)


def _signature(form: PartForm) -> str:
    inputs = " ".join(
        _text(view) + ("'" if view.of.requires_grad else "") for view in _inputs(form)
    )
    outputs = " ".join(map(_text, _outputs(form)))
    sizes = ",".join(map(str, form.extents))
    return f"{form.op.computes} | {inputs} -> {outputs} | {sizes}"


class _View(NamedTuple):
    """The box that a part reads or writes of a tensor."""

    of: TensorForm
    box: rv.Box

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return self.box.num_elements * ITEM_BYTES[self.of.dtype]


def _inputs(form: PartForm) -> list[_View]:
    return [_View(of, box) for of, (box, _) in zip(form.op.inputs, form.inputs, strict=True)]


def _outputs(form: PartForm) -> list[_View]:
    return [_View(of, box) for of, (box, _) in zip(form.op.outputs, form.outputs, strict=True)]


def _text(view: _View) -> str:
    return f"{view.of.dtype}{list(view.box.shape)}"


def forward_bytes(form: PartForm) -> int:
    """Memory traffic of the forward."""
    written = sum(view.num_bytes for view in _outputs(form))
    read = sum(
        written if form.op.kind in LOOK_UPS and view.of.kind == PARAMETER else view.num_bytes
        for view in _inputs(form)
    )
    return read + written


def backward_bytes(form: PartForm) -> int:
    """Memory traffic of the backward: saved tensors and gradients."""
    inputs, outputs = _inputs(form), _outputs(form)
    operands, kind = (*inputs, *outputs), form.op.kind
    saved = sum(
        operands[i].box.num_elements * SAVED_ITEM_BYTES.get(kind, 0) or operands[i].num_bytes
        for i in form.op.saves
    )
    given = sum(view.num_bytes for view in outputs if view.of.requires_grad)
    wanted = [view for view in inputs if view.of.requires_grad]
    weights = [view for view in wanted if view.of.kind == PARAMETER]
    is_product = len(wanted) > len(weights) and kind not in LOOK_UPS
    again = sum(view.num_bytes for view in weights) if is_product else 0
    return saved + given + again + sum(view.num_bytes for view in wanted)


def backward_products(op: OpForm) -> float:
    """Operations of the backward divided by those of the forward: one per gradient, two at most."""
    wanted = sum(of.requires_grad for of in op.inputs)
    return BACKWARD_FLOPS.get(op.kind, min(2, wanted))


def forward_flops(form: PartForm) -> float:
    """Operations of the forward."""
    return form.op.flops * form.volume


def halves(ops: Sequence[Op]) -> tuple[tuple[float, float], ...]:
    """The shares of I and W in the backward of a segment's parts, by the ops of the parts."""
    return tuple(map(_shares, halves_of(ops)))


def _shares(halves: HalvesOfOp) -> tuple[float, float]:
    if halves.inputs and halves.weights:
        return 1 - BOTH, BOTH
    return float(bool(halves.inputs)), float(bool(halves.weights))


class OpTimes:
    """Times of parts on a device; each form of a part is looked up once.

    Roofline (Williams, Waterman, Patterson 2009): an op takes as long as its operations or its
    memory traffic, whichever is longer. Operands are read and results written once. Each reaches a
    share of the device's peak that depends on its amount (``Reach``): the operations of the part's
    own product, not of the whole op, and the part's bytes.

    Args:
        profile: profile of the device.
        grown: every part reaches the shares of a part with ``grown`` times its work. If shares do
            not fall, times are then lower bounds for 1/``grown`` of that work, however it is cut.
    """

    def __init__(self, profile: DeviceProfile, grown: float = 1.0) -> None:
        self.profile = profile
        self._grown = grown

    def forward_secs(self, part: Part) -> float:
        """Seconds of the forward."""
        return self.of(part.form)[0]

    def backward_secs(self, part: Part) -> float:
        """Seconds of the backward, without recomputation."""
        return self.of(part.form)[1]

    def sum_secs(self, num_bytes: int) -> float:
        """Seconds of accumulating a weight's gradient of this size.

        A whole microbatch has run since the gradient was last read, so no cache holds it. The
        same goes for the tensors of ``update_secs``.
        """
        return ACCUMULATE * self.profile.cold_secs(num_bytes)

    def update_secs(self, num_states: int, here_bytes: int, hosted_bytes: int = 0) -> float:
        """Seconds of the optimizer: one fused pass over gradients, weights and states.

        Weights are stored on the device (``here``) or on its host; each element has ``num_states``.
        """
        passes = 3 + 2 * num_states
        here_secs = passes * self.profile.cold_secs(here_bytes)
        return here_secs + passes * hosted_bytes / self.profile.host_memory_bytes_per_sec

    def launches(self, part: Part) -> Launches:
        """The kernels of a part; none if the host takes no time to launch them."""
        return launches_of(part) if self.profile.issue_secs else Launches(0, 0)

    @remembers(MAX_PART_FORMS)
    def of(self, form: PartForm) -> tuple[float, float]:
        """Seconds of the forward and of the backward of a part, by its form."""
        if self.profile.op_secs:
            measured = self.profile.op_secs.get(_signature(form))
            if measured is not None:
                return measured
        if form.op.kind in VIEWS:
            return 0.0, 0.0
        forward = self._roofline(form, 1, forward_bytes(form))
        if not any(of.requires_grad for of in form.op.outputs):
            return forward, 0.0
        return forward, self._roofline(form, backward_products(form.op), backward_bytes(form))

    def _roofline(self, form: PartForm, num_products: float, num_bytes: int) -> float:
        profile, dtype = self.profile, form.op.outputs[0].dtype
        bytes_secs = profile.bytes_secs(num_bytes, self._grown)
        # Comparisons and counts have no significant arithmetic.
        if not num_products or not dtype.startswith(("float", "bfloat")):
            return bytes_secs + profile.launch_secs
        flops = forward_flops(form)
        flops_secs = profile.flops_secs(flops, dtype, form.op.kind, self._grown)
        return max(num_products * flops_secs, bytes_secs) + profile.launch_secs
