"""Bounds: lower bounds of the time and memory of all plans of a setting, without making a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from superscaler_core.cost.neighbours import product_of
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.evaluation.request import Request
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.part import Part
from superscaler_core.memory import STATES
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import kept_bytes


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower bounds for one request, from its smallest microbatches, as capturing takes seconds.

    Time: the devices together compute every op at least once for every microbatch, so the slowest
    device takes at least the mean. Speeds grow with the work, so no part of any microbatch is
    faster than the whole op at the largest microbatch. At that speed, the roofline gives an op the
    time ``max(f, a + w)``: f for operations, a for traffic of activations, w for traffic of
    weights. Here f and a are linear in the samples k, or constant (as for making a mask). The time
    is therefore convex in k, so the time per added sample between two sizes is a lower bound of the
    time per added sample at larger sizes. Constant times are not in the bound.

    Memory: weights, gradients and optimizer states are on some device. When a microbatch ends its
    forward, all that its backward needs is on some device.

    Measured times of ops (``DeviceProfile.op_secs``) follow no law of speeds: a library may compute
    larger microbatches by another algorithm. There is no bound of time with them.
    """

    request: Request

    @property
    def _graph(self) -> Graph:
        return self.request.graph_of(self.request.samples[0])

    @cached_property
    def _sample_secs(self) -> float:
        """Seconds that a sample adds at least to a forward and a backward on one device."""
        samples = self.request.samples
        times = OpTimes(self.request.profile, grown=samples[-1] / samples[0])

        def secs(num: int) -> float:
            graph, total = self.request.graph_of(num), 0.0
            for op in graph.ops:
                part = Part(op)
                # A bias takes no time where the product before it adds it in its own call.
                is_free = product_of(graph, op) is not None
                total += times.backward_secs(part) + (0.0 if is_free else times.forward_secs(part))
            return total

        if len(samples) == 1:
            return secs(samples[0]) / samples[0]
        # The second size is priced at higher speeds than the first, which lowers the difference.
        first, second = samples[:2]
        return max(0.0, secs(second) - secs(first)) / (second - first)

    @property
    def computing_secs(self) -> float:
        """Seconds of a step in which all devices compute, each op once and at its highest speed.

        A lower bound where speeds grow with the work, else an estimate.
        """
        return self._sample_secs * self.request.batch / len(self.request.devices)

    @property
    def secs(self) -> float:
        """A lower bound of the seconds of a step; 0 if times of ops were measured."""
        return 0.0 if self.request.profile.op_secs else self.computing_secs

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
