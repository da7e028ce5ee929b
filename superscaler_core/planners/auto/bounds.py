"""Bounds: what every plan of a setting takes and needs at least, without a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.memory import STATES
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import compute_secs, kept_bytes
from superscaler_core.planners.request import Request


@dataclass(eq=False)
class Bounds:
    """Lower bounds for one request.

    Of time: the devices together compute every op at least once, so the slowest takes at least its
    share. A part of an op takes at least its share of the op's time, as every op has its launch.

    Of memory: weights, gradients and states are somewhere; and when a microbatch has ended its
    forward, all that its backward needs is on some device.
    """

    request: Request
    _secs: dict[int, float] = field(default_factory=dict)
    _kept: dict[int, int] = field(default_factory=dict)

    def secs(self, setting: Setting) -> float:
        """A lower bound of a step."""
        samples, request = setting.microbatch, self.request
        if samples not in self._secs:
            self._secs[samples] = compute_secs(request.graph_of(samples), request.profile)
        return self._secs[samples] * request.microbatches(samples) / len(request.devices)

    def guess_secs(self, setting: Setting) -> float:
        """An estimate of a step, in no direction: with the bubble, and what is sent often."""
        num = self.request.microbatches(setting.microbatch)
        bubble = (setting.pp - 1) / (num * setting.chunks)
        wide = WIDE if setting.tp > self._per_host else 1.0 + SENT * setting.tp
        return self.secs(setting) * (1 + bubble) * wide

    @property
    def _per_host(self) -> int:
        outer = self.request.topology.levels[1:2]
        return len(outer[0].groups[0]) if outer else len(self.request.devices)

    def least_bytes(self, setting: Setting) -> float:
        """A lower bound of the memory of the fullest device."""
        request = self.request
        num = len(request.devices)
        splits = num if setting.zero == 3 or setting.family == "interlaced" else num // setting.dp
        if setting.family == "axial" and setting.zero < 3:
            splits = setting.pp
        if setting.family == "spatial":
            splits = num if setting.zero == 3 else 1
        if setting.experts:
            splits = num
        state_splits = num if setting.zero else splits
        graph = request.graph_of(setting.microbatch)
        trained = [t for t in graph.parameters.values() if t.requires_grad]
        numbers = sum(t.box.num_elements for t in trained)
        weights = sum(t.num_bytes for t in trained)
        stored = ITEM_BYTES[request.master_dtype] * numbers if request.master_dtype else weights
        has_masters = request.master_dtype is not None and stored != weights
        states = STATES[request.optimizer] * stored + (stored if has_masters else 0)
        if setting.offload:
            return 0.0
        rest = weights / splits + states / state_splits
        if setting.keep is not Keep.EVERYTHING or setting.coshard > 1:
            return rest
        if setting.microbatch not in self._kept:
            self._kept[setting.microbatch] = kept_bytes(graph)
        return rest + self._kept[setting.microbatch] / num


SENT, WIDE = 0.02, 4.0
"""What tensor parallel is guessed to cost for every device, and between hosts; no more than an
order: Megatron-LM's users keep it inside hosts."""
