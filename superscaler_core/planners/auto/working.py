"""Working: estimate the time of computing from degrees and the sizes of ops alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from superscaler_core.cost.op_time import OpTimes
from superscaler_core.graph.blocks import OpGroup, find_blocks
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.planners.search.request import Request

PASSES = 3
"""Launches of an op per microbatch: one in the forward, two in the backward."""


@dataclass(frozen=True, eq=False)
class Working:
    """Estimates (not bounds) for one request, from the ops of its smallest microbatch.

    An op runs at the speed of the part that one device computes. Most ops grow with the microbatch;
    the work of others, such as those that make a mask, does not depend on its size.
    """

    request: Request

    def sample_secs(self, samples: int, parts: int) -> float:
        """Device-seconds of a sample's forward and backward, without launches.

        Args:
            samples: samples of a microbatch.
            parts: parts of every op, each computed separately.
        """
        first = self.request.samples[0]
        growing, fixed = self._ops
        each = self._secs(growing, samples / (first * parts)) / first
        return each + self._secs(fixed, 1 / parts) / samples if fixed else each

    @cached_property
    def layer_shares(self) -> tuple[float, ...]:
        """The share of each block in the computing time of all blocks."""
        graph = self.request.graph_of(self.request.samples[0])
        secs = [self._secs(layer, 1.0) for layer in find_blocks(graph).layers]
        total = sum(secs)
        return tuple(each / total if total else 1 / len(secs) for each in secs)

    @cached_property
    def _secs(self) -> Callable[[OpGroup, float], float]:
        return cache(self._find)

    def _find(self, ops: OpGroup, grown: float) -> float:
        """Seconds of ops, each at the speed of an op with ``grown`` times its work."""
        times, launch_secs = OpTimes(self.request.profile, grown), self.request.profile.launch_secs
        parts = [Part(op) for op in ops]
        secs = sum(times.forward_secs(part) + times.backward_secs(part) for part in parts)
        return max(0.0, secs - PASSES * len(parts) * launch_secs)

    @cached_property
    def _ops(self) -> tuple[OpGroup, OpGroup]:
        """The ops that grow with the microbatch, and those that do not."""
        ops, *more = (self.request.graph_of(n).ops for n in self.request.samples[:2])
        if not more or len(more[0]) != len(ops):
            return ops, ()
        fixed = {a for a, b in zip(ops, more[0], strict=True) if _shapes(a) == _shapes(b)}
        return tuple(op for op in ops if op not in fixed), tuple(op for op in ops if op in fixed)


def _shapes(op: Op) -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in (*op.inputs, *op.outputs)]
