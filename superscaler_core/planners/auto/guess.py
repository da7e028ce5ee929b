"""Guess: what a step takes and needs, from the setting alone; it sets the order of looking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.cost.op_time import OpTimes
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.part import Part
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.search.request import Request

SENT, WIDE = 0.02, 4.0
"""What tensor parallel costs for every device, and between hosts, as shares of a step. Users of
Megatron-LM keep it inside hosts."""

AGAIN: Mapping[Keep, float] = {
    Keep.EVERYTHING: 1.0,
    Keep.ATTENTION_ONLY: 1.1,
    Keep.SEGMENT_INPUTS: 1.3,
    Keep.BLOCK_INPUTS: 1.34,
    Keep.STAGE_INPUT: 1.35,
}
"""What a step takes longer for what is computed again: a forward is a third of it."""

LEFT: Mapping[Keep, float] = {
    Keep.EVERYTHING: 1.0,
    Keep.ATTENTION_ONLY: 0.4,
    Keep.SEGMENT_INPUTS: 0.2,
    Keep.BLOCK_INPUTS: 0.05,
    Keep.STAGE_INPUT: 0.02,
}
"""What is left of what is kept, about the least that models have."""

AGAIN_HEAVY, LEFT_HEAVY = 1.15, 0.5
"""The same of a model of which the blocks that keep most are in parts."""

FETCHED, HOSTED = 1.03, 1.1
"""The same for weights that are fetched from other devices, and from the host."""

PASSES = 3
"""Launches of an op: one in the forward, two in the backward."""


@dataclass(frozen=True, eq=False)
class Guess:
    """Estimates, in no direction, for one request, all from its smallest microbatch.

    An op is as fast as one of the part that a device gets of it; every microbatch launches it.
    Communication is a share that depends on the degrees alone.
    """

    request: Request

    def secs(self, setting: Setting) -> float:
        """What a step takes."""
        request = self.request
        num = request.microbatches(setting.microbatch)
        work = self._work_secs(setting.samples / (setting.tp * setting.coshard))
        launches = num / setting.pp * PASSES * len(self._graph.ops) * request.profile.launch_secs
        bubble = (setting.pp - 1) / (num * setting.chunks)
        wide = WIDE if setting.tp > self._per_host else 1.0 + SENT * setting.tp
        stored = (FETCHED if setting.zero == 3 else 1.0) * (HOSTED if setting.offload else 1.0)
        alone = work * request.batch / len(request.devices) + launches * setting.coshard
        return alone * (1 + bubble) * wide * stored * _again(setting)

    def num_bytes(self, setting: Setting) -> float:
        """What the fullest device needs."""
        return self._bounds.stored_bytes(setting) + self._kept_bytes(setting)

    def smaller_bytes(self, setting: Setting, peak_bytes: float, changed: Setting) -> float:
        """The same of a changed setting, given what was seen without the change."""
        kept = peak_bytes - self._bounds.stored_bytes(setting)
        share = self._kept_bytes(changed) / self._kept_bytes(setting)
        return self._bounds.stored_bytes(changed) + max(0.0, kept) * share

    def _kept_bytes(self, setting: Setting) -> float:
        """What backwards need: a pipeline's first stage has as many microbatches as it has less."""
        sample_bytes = self._bounds.kept_bytes / self.request.samples[0]
        left = LEFT[setting.keep]
        if setting.heavy:
            left *= LEFT_HEAVY
        elif setting.coshard > 1:
            left = min(left, LEFT[Keep.BLOCK_INPUTS]) / setting.coshard
        return sample_bytes * setting.samples / setting.tp * left

    def _work_secs(self, samples: float) -> float:
        """A forward and a backward of a sample on one device, in microbatches of so many."""
        if samples not in self._works:
            first = self.request.samples[0]
            times = OpTimes(self.request.profile, grown=samples / first)
            parts = [Part(op) for op in self._graph.ops]
            secs = sum(times.forward_secs(part) + times.backward_secs(part) for part in parts)
            launches = PASSES * len(parts) * self.request.profile.launch_secs
            self._works[samples] = max(0.0, secs - launches) / first
        return self._works[samples]

    @cached_property
    def _works(self) -> dict[float, float]:
        return {}

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds(self.request)

    @cached_property
    def _graph(self) -> Graph:
        return self.request.graph_of(self.request.samples[0])

    @cached_property
    def _per_host(self) -> int:
        outer = self.request.topology.levels[1:2]
        return len(outer[0].groups[0]) if outer else len(self.request.devices)


def _again(setting: Setting) -> float:
    """What is computed again; a co-shard's parts are, so that one is kept at a time."""
    in_parts = AGAIN[Keep.BLOCK_INPUTS] if setting.coshard > 1 else 1.0
    return max(AGAIN[setting.keep], AGAIN_HEAVY if setting.heavy else in_parts)
