"""Sending: how long communication takes under a setting, by degrees and bytes alone.

A group of devices has ``size`` members that are ``stride`` apart. Its collectives go level by
level: reduce-scatter inside each host, then between hosts, where all devices of a host share its
port, then all-gather (Cho et al., "BlueConnect", 2019).
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
"""What is summed in the forward is gathered in the backward, and the other way round."""


@dataclass(frozen=True, eq=False)
class Sending:
    """Times of communication that nothing hides.

    Attributes:
        traits: of the model, with its smallest microbatch.
        topology: of the cluster.
    """

    traits: Traits
    topology: rv.Topology

    # --- a group of devices ---------------------------------------------------------------------

    def all_reduce_secs(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """A sum of so many bytes over each of all groups at once; a gather takes half of it."""
        secs, left = 0.0, num_bytes
        for link, sharing, num in self._meetings(size, stride):
            if num > 1:
                sent = 2 * (num - 1) / num * left * sharing
                secs += 2 * link.alpha_secs + sent / link.bytes_per_sec
            left /= num
        return secs

    def all_to_all_secs(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """An exchange: each member sends an equal part of so many bytes to each other one."""
        secs, inside = 0.0, float(size)
        for link, sharing, num in self._meetings(size, stride):
            if num > 1:
                sent = (1 - 1 / inside) * num_bytes * sharing
                secs += link.alpha_secs + sent / link.bytes_per_sec
            inside /= num
        return secs

    def _meetings(self, size: int, stride: int) -> Iterator[tuple[rv.Link, int, float]]:
        """For each level: its link, the devices that share it, the ports of a group that meet."""
        num = len(self.topology.ranks)
        levels = self.topology.levels
        sharing = [min(num, len(level.groups[0])) for level in levels]
        ports = [*(max(1.0, min(size, size * stride / n)) for n in sharing), 1.0]
        for level, shared, (inner, outer) in zip(levels, sharing, pairwise(ports), strict=True):
            yield level.link, shared, inner / outer

    # --- what a model sends ---------------------------------------------------------------------

    @cached_property
    def summed(self) -> tuple[int, int]:
        """Sums over features that tensor parallel cuts, and those of their gradients.

        Returns:
            How many there are in a microbatch, and their bytes.
        """
        return WAYS * len(self.traits.sums), WAYS * self.traits.summed_bytes

    @cached_property
    def dealt_bytes(self) -> int:
        """What a microbatch sends to its experts and back, with the gradients."""
        return WAYS * sum(
            min(tensor.num_bytes for tensor in (*_read(op), *op.outputs))
            for op in self.traits.expert_maps
        )


def _read(op: Op) -> list[PTensor]:
    """Activations that an op reads."""
    return [tensor for tensor in op.inputs if tensor not in op.parameters]
