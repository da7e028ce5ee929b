"""Bounds: what every plan of a setting takes and needs at least, without a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from superscaler_core.cost.op_time import OpTimes
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ITEM_BYTES, PTensor
from superscaler_core.memory import STATES
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import kept_bytes
from superscaler_core.planners.search.request import Request


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower bounds for one request, from its smallest microbatches: capturing takes seconds.

    Of time: the devices together compute every op at least once for every microbatch, so the
    slowest takes at least its share. Speeds grow with the work, so no part of any microbatch is
    faster than the whole op at the largest microbatch. At that speed an op takes, by the roofline,
    ``max(f, a + w)`` for its operations, its activations' traffic and that of its weights, of which
    f and a grow evenly with the samples k, or, as for the making of a mask, not at all. That is
    convex in k, so of two sizes the difference a sample is a lower bound of every larger one's;
    what does not grow is not in it.

    Of memory: weights, gradients and states are somewhere; and when a microbatch has ended its
    forward, all that its backward needs is on some device.

    With measured times of ops (``DeviceProfile.op_secs``) the bound of time is an estimate.
    """

    request: Request

    @property
    def _graph(self) -> Graph:
        return self.request.graph_of(self.request.samples[0])

    @cached_property
    def _sample_secs(self) -> float:
        """The least time that a sample adds to a forward and a backward on one device."""
        samples = self.request.samples
        times = OpTimes(self.request.profile, grown=samples[-1] / samples[0])

        def secs(num: int) -> float:
            parts = map(Part, self.request.graph_of(num).ops)
            return sum(times.forward_secs(part) + times.backward_secs(part) for part in parts)

        if len(samples) == 1:
            return secs(samples[0]) / samples[0]
        # The second size is at higher speeds than the first's, so the difference is less still.
        first, second = samples[:2]
        return max(0.0, secs(second) - secs(first)) / (second - first)

    def secs(self, setting: Setting) -> float:
        """A lower bound of a step."""
        return self._sample_secs * self.request.batch / len(self.request.devices)

    def least_bytes(self, setting: Setting) -> float:
        """A lower bound of the memory of the fullest device."""
        if setting.offload:
            return 0.0
        keeps_all = setting.keep is Keep.EVERYTHING and setting.coshard == 1
        kept_bytes = self.kept_bytes / len(self.request.devices) if keeps_all else 0.0
        return self.stored_bytes(setting) + kept_bytes

    def stored_bytes(self, setting: Setting) -> float:
        """The same of weights and their states, without what is on the host."""
        if setting.offload:
            return 0.0
        num, (weights, states) = len(self.request.devices), self.trained_bytes
        splits = 1.0 * _splits(setting, num)
        return weights / splits + states / (num if setting.zero else splits)

    @property
    def is_tight(self) -> bool:
        """Whether no plan can keep all that backwards need, so that all compute it again."""
        kept = self.kept_bytes / len(self.request.devices)
        return kept > self.request.memory_bytes

    @cached_property
    def trained_bytes(self) -> tuple[float, float]:
        """Bytes of all weights that are trained, and of their optimizer's states and masters."""
        weights = sum(tensor.num_bytes for tensor in self._trained)
        masters = self.gradient_bytes
        return weights, (STATES[self.request.optimizer] + (masters != weights)) * masters

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all weights, which are summed up in the masters' dtype."""
        if self.request.master_dtype is None:
            return sum(tensor.num_bytes for tensor in self._trained)
        size = ITEM_BYTES[self.request.master_dtype]
        return sum(size * tensor.box.num_elements for tensor in self._trained)

    @property
    def _trained(self) -> list[PTensor]:
        return [t for t in self._graph.parameters.values() if t.requires_grad]

    @cached_property
    def kept_bytes(self) -> int:
        """What the smallest microbatch keeps; no other keeps less."""
        return kept_bytes(self._graph)


def _splits(setting: Setting, num: int) -> int:
    """Into how many parts weights are cut at most."""
    if setting.zero == 3 or setting.experts or setting.family == "interlaced":
        return num
    return {"axial": setting.pp, "spatial": 1}.get(setting.family, setting.tp * setting.pp)
