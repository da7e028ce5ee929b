"""Sending: estimate the time of communication under a setting, from degrees and bytes alone.

A group of devices has ``size`` members that are ``stride`` apart. An all-reduce goes level by
level: reduce-scatter inside each host, all-reduce between hosts, where all devices of a host share
its port, then all-gather inside each host (Cho et al., "BlueConnect", 2019).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import rvdcomm as rv
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.planners.auto.traits import Traits

WAYS = 2
"""Passes that communicate: every collective of the forward has a counterpart in the backward."""


@dataclass(frozen=True, eq=False)
class Sending:
    """Times and bytes of a model's communication on a cluster, without overlap.

    Attributes:
        traits: traits of the model with its smallest microbatch.
        topology: topology of the cluster.
    """

    traits: Traits
    topology: rv.Topology

    # --- a group of devices ---------------------------------------------------------------------

    def all_reduce_secs(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Seconds of all-reduces of ``num_bytes`` in all groups at once; all-gathers take half."""
        secs, left = 0.0, num_bytes
        for link, sharing, num in self._meetings(size, stride):
            if num > 1:
                sent = 2 * (num - 1) / num * left * sharing
                secs += 2 * link.alpha_secs + sent / link.bytes_per_sec
            left /= num
        return secs

    def all_to_all_secs(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Seconds of all-to-alls in all groups at once; each member has ``num_bytes`` to send."""
        secs, inside = 0.0, float(size)
        for link, sharing, num in self._meetings(size, stride):
            if num > 1:
                sent = (1 - 1 / inside) * num_bytes * sharing
                secs += link.alpha_secs + sent / link.bytes_per_sec
            inside /= num
        return secs

    def _meetings(self, size: int, stride: int) -> Iterator[tuple[rv.Link, int, float]]:
        """For each level: its link, devices behind a port, ports of a group that communicate."""
        num = len(self.topology.ranks)
        levels = self.topology.levels
        sharing = [min(num, len(level.groups[0])) for level in levels]
        ports = [*(max(1.0, min(size, size * stride / n)) for n in sharing), 1.0]
        for level, shared, (inner, outer) in zip(levels, sharing, pairwise(ports), strict=True):
            yield level.link, shared, inner / outer

    # --- what a model sends ---------------------------------------------------------------------

    @cached_property
    def summed(self) -> tuple[int, int]:
        """Number and bytes of the sums that tensor parallelism all-reduces per microbatch.

        Both count forward and backward.
        """
        return WAYS * len(self.traits.sums), WAYS * self.traits.summed_bytes

    @cached_property
    def dealt_bytes(self) -> int:
        """Bytes that a microbatch sends to its experts and back, gradients included."""
        return WAYS * sum(
            min(tensor.num_bytes for tensor in (*_read(op), *op.outputs))
            for op in self.traits.expert_maps
        )


def _read(op: Op) -> list[PTensor]:
    """The activations that an op reads."""
    return [tensor for tensor in op.inputs if tensor not in op.parameters]
