"""Bounds: lower bounds of the memory of all plans of a setting, beside that of their time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from superscaler_core.evaluation.lower_bound import LowerBound
from superscaler_core.graph.graph import Graph
from superscaler_core.memory import STATES
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import kept_bytes


@dataclass(frozen=True, eq=False)
class Bounds(LowerBound):
    """Lower bounds for one request, from its smallest microbatches, as capturing takes seconds.

    Memory: weights, gradients and optimizer states are on some device. When a microbatch ends its
    forward, all that its backward needs is on some device.
    """

    @property
    def _graph(self) -> Graph:
        return self.request.graph_of(self.request.samples[0])

    def least_bytes(self, setting: Setting) -> float:
        """A lower bound of the bytes on the fullest device."""
        if setting.offload:
            return 0.0
        num = len(self.request.devices)
        splits = _splits(setting, num)
        states = self.state_bytes / (num if setting.zero else splits)
        keeps_all = setting.keep is Keep.EVERYTHING and setting.coshard == 1
        kept = kept_bytes(self._graph) / num if keeps_all else 0.0
        return self.weight_bytes / splits + states + kept

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights, also of those that are not trained."""
        return sum(tensor.num_bytes for tensor in self._graph.parameters.values())

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states and master weights of all trained weights."""
        trained = [t for t in self._graph.parameters.values() if t.requires_grad]
        own = sum(tensor.num_bytes for tensor in trained)
        item_bytes = self.request.precision.item_bytes
        each = sum(tensor.box.num_elements * item_bytes(tensor.dtype) for tensor in trained)
        return (STATES[self.request.optimizer] + (each != own)) * each


def _splits(setting: Setting, num: int) -> int:
    """The largest number of parts into which weights are cut."""
    if setting.zero == 3 or setting.experts or setting.family == "interlaced":
        return num
    return {"axial": setting.pp, "spatial": 1}.get(setting.family, setting.tp * setting.pp)
