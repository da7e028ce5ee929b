"""Lower bound: seconds of a step that no plan of a request takes less than."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.units import secs_text
from superscaler_core.cost.neighbours import product_of
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.evaluation.least_recomputed import Room, least_recomputed
from superscaler_core.evaluation.request import Request
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part
from superscaler_core.memory import STATES

ROUNDING = 1e-9
"""Relative: times of steps are whole ticks."""


@dataclass(frozen=True, eq=False)
class LowerBound:
    """A relaxation of all plans of a request: work alone counts, and all devices share it equally.

    The space is every plan that computes each op of each sample at least once, cut in any way along
    its loops, in microbatches of the request's sizes, and updates each trained weight once.
    Communication, the order of ops, and the memory of weights are left out. So a plan near the
    bound is near the best of all; one far from it may be best as well.

    Computing: the devices together compute every op at least once for every microbatch, so the
    slowest device takes at least the mean. Speeds grow with the work, so no part of any microbatch
    is faster than the whole op at the largest microbatch. At that speed, the roofline gives an op
    the time ``max(f, a + w)``: f for operations, a for traffic of activations, w for traffic of
    weights. Here f and a are linear in the samples k, or constant (as for making a mask). The time
    is therefore convex in k, so the time per added sample between two sizes is a lower bound of the
    time per added sample at larger sizes. Constant times are not in the bound. Ops on whose results
    a recycled value depends are computed once more in each pass without gradient.

    Recomputing: what the backward of a sample needs is kept by some device, copied to its host, or
    computed again (``least_recomputed``); the devices have the memory of the request.

    Updating: some device reads and writes each trained weight, its gradient and its states, in its
    own memory or its host's, whichever is faster.

    Measured times of ops (``DeviceProfile.op_secs``) follow no law of speeds: a library may compute
    larger microbatches by another algorithm. There is no bound of time with them, or with shares
    that fall as the work grows.

    Laws (tests/superscaler_core/evaluation/test_lower_bound.py): no shipped plan and no trial of a
    search is faster, also if devices have no more memory than the plan takes.
    """

    request: Request

    @cached_property
    def _secs_of(self) -> list[tuple[float, float]]:
        """For each op, what a sample adds at least to its forward and its backward on one device.

        A bias takes no time where the product before it adds it in its own call. An op that one of
        two sizes lacks, as the spreading of a constant over one sample, adds nothing.
        """
        samples = self.request.samples
        times = OpTimes(self.request.profile, grown=samples[-1] / samples[0])

        def secs(num: int) -> dict[str, tuple[float, float]]:
            graph = self.request.graph_of(num)
            free = {op.name: product_of(graph, op) is not None for op in graph.ops}
            pairs = {op.name: times.of(Part(op).form) for op in graph.ops}
            return {name: (a * (not free[name]), b) for name, (a, b) in pairs.items()}

        if len(samples) == 1:
            return [(a / samples[0], b / samples[0]) for a, b in secs(samples[0]).values()]
        # The second size is priced at higher speeds than the first, which lowers the difference.
        first, second = samples[:2]
        found, later = [], secs(second)
        for name, before in secs(first).items():
            after = later.get(name, before)
            added = (max(0.0, y - x) / (second - first) for x, y in zip(before, after, strict=True))
            found.append((next(added), next(added)))
        return found

    @property
    def computing_secs(self) -> float:
        """Seconds of a step in which all devices compute, each op once and at its highest speed.

        A lower bound where speeds grow with the work, else an estimate.
        """
        return self._at_once(self._sample_secs)

    @cached_property
    def _sample_secs(self) -> float:
        graph = self.request.graph_of(self.request.samples[0])
        again = _recycled(graph) if self.request.recycle else set()
        return sum(
            backward + forward * (1 + self.request.recycle * (op in again))
            for op, (forward, backward) in zip(graph.ops, self._secs_of, strict=True)
        )

    def _at_once(self, sample_secs: float) -> float:
        """Seconds of a step whose samples take a device so long each."""
        return sample_secs * self.request.batch / len(self.request.devices)

    @cached_property
    def recomputing_secs(self) -> float:
        """Seconds for which memory makes all devices compute again, or wait for copies."""
        request, num = self.request, len(self.request.devices)
        samples = request.samples[0]
        graph = request.graph_of(samples)
        secs_of = {op: forward / num for op, (forward, _) in
                   zip(graph.ops, self._secs_of, strict=True)}  # fmt: skip
        base_secs = self._sample_secs / num
        room = Room(num * request.memory_bytes, num * request.profile.host_bytes_per_sec)
        least = least_recomputed(graph, samples, secs_of.__getitem__, base_secs, room)
        return (least - base_secs) * request.batch

    @cached_property
    def updating_secs(self) -> float:
        """Seconds in which all devices update the trained weights."""
        request, profile = self.request, self.request.profile
        graph = request.graph_of(request.samples[0])
        num_bytes = sum(
            tensor.box.num_elements * request.precision.item_bytes(tensor.dtype)
            for tensor in graph.parameters.values()
            if tensor.requires_grad
        )
        # A pass that no cache holds is never faster than a long one (``cold_secs``).
        share = profile.memory.points[-1][1]
        rate = max(profile.bytes_per_sec * share, profile.host_memory_bytes_per_sec)
        passes = 3 + 2 * STATES[request.optimizer]
        return passes * num_bytes / rate / len(request.devices)

    @property
    def secs(self) -> float:
        """A lower bound of the seconds of a step; 0 if there is none (``why_not``)."""
        return 0.0 if self.why_not else sum(self.parts.values()) * (1 - ROUNDING)

    @property
    def why_not(self) -> str:
        """Why the profile has no bound; empty if it has one."""
        profile = self.request.profile
        if profile.op_secs:
            return "measured times of ops follow no law of speeds"
        tables = (*profile.products.values(), *profile.attention.values(), profile.memory)
        if not all(table.is_rising for table in tables):
            return "the profile has shares that fall with the amount of work"
        return ""

    @property
    def parts(self) -> Mapping[str, float]:
        """The bound's parts, in seconds of a step."""
        return {
            "computing": self.computing_secs,
            "recomputing": self.recomputing_secs,
            "updating": self.updating_secs,
        }

    def certificate(self, secs: float) -> str:
        """How far a step is from the bound, as text."""
        if not self.secs:
            return f"none: {self.why_not or 'the step has no work'}"
        parts = " + ".join(f"{secs_text(x)} {name}" for name, x in self.parts.items() if x)
        return f"{parts}, shared equally; this plan takes {secs / self.secs:.3f} x"


def _recycled(graph: Graph) -> Collection[Op]:
    """The ops on whose results recycled values depend."""
    found: set[Op] = set()
    left = [graph.producer[t] for t in graph.recycled.values() if t in graph.producer]
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [graph.producer[t] for t in op.inputs if t in graph.producer]
    return found
