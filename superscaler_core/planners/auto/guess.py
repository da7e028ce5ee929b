"""Guess: what a step takes and needs, from the setting alone; it sets the order of looking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.holding import Holding, replicas
from superscaler_core.planners.auto.sending import Sending
from superscaler_core.planners.auto.setting import ROWS, Setting
from superscaler_core.planners.auto.traits import Traits, traits_of
from superscaler_core.planners.auto.working import PASSES, Working
from superscaler_core.planners.search.request import Request

SENT, WIDE = 0.02, 4.0
"""What cutting rows and columns costs for every device, and between hosts, as shares of a step."""

HIDDEN = 0.5
"""The share of sums of gradients that computing hides, if they are overlapped."""

FETCHING = 0.9
"""The share of a microbatch in which weights are fetched, if that is ahead of their use."""

AGAIN: Mapping[Keep, float] = {
    Keep.EVERYTHING: 1.0,
    Keep.ATTENTION_ONLY: 1.1,
    Keep.SEGMENT_INPUTS: 1.3,
    Keep.BLOCK_INPUTS: 1.34,
    Keep.STAGE_INPUT: 1.35,
}
"""What a step takes longer for what is computed again: a forward is a third of it."""

FORWARD = 1 / 3
"""The share of a turn without gradient."""

AGAIN_HEAVY = 1.15
"""The same of a model of which the blocks that keep most are in parts."""

FETCHES = 1.5
"""What fetched weights are sent in a microbatch, in all-reduces: gathered in the forward and in the
backward, and their gradients scattered; an all-reduce is a scatter and a gather."""

HOST_TRIPS = 3
"""The same between a device and its host, if weights are there; and as often the host reads or
writes them, as it adds up gradients."""


@dataclass(frozen=True, eq=False)
class Guess:
    """Estimates, in no direction, for one request, all from its smallest microbatches.

    An op is as fast as one of the part that a device gets of it; every microbatch launches it.
    Communication is that of the shipped plans, by its bytes (``Sending``).
    """

    request: Request

    def secs(self, setting: Setting) -> float:
        """What a step takes."""
        request = self.request
        num = request.microbatches(setting.microbatch)
        work = self._working.sample_secs(setting.samples, setting.tp * setting.coshard)
        launches = num / setting.pp * PASSES * len(self._graph.ops) * request.profile.launch_secs
        alone = work * request.batch / len(request.devices) + launches * setting.coshard
        again = _again(setting) + request.recycle * FORWARD
        busy = alone * again + num / setting.pp * self._cut_secs(setting)
        bubble = (setting.pp - 1) / (num * setting.chunks)
        return busy * (1 + bubble) + self._weights_secs(setting, busy / num)

    def _cut_secs(self, setting: Setting) -> float:
        """What all stages send in a microbatch, as ops are cut."""
        sending, tp, dp = self._sending, setting.tp, setting.dp
        if setting.family in ROWS:
            share = WIDE if tp > self._per_host else SENT * tp
            return share * self._working.sample_secs(setting.samples, tp) * setting.samples / tp
        times, num_bytes = sending.summed
        grown = setting.samples / self.request.samples[0]
        secs = times * sending.all_reduce_secs(num_bytes * grown / max(times, 1), tp)
        if setting.experts:
            secs += sending.all_to_all_secs(sending.dealt_bytes * grown / tp, dp, tp)
        return secs

    def _weights_secs(self, setting: Setting, microbatch_secs: float) -> float:
        """What weights and gradients are sent for longer than computing hides."""
        _, size, stride = replicas(setting)
        own, profile = self._holding.held_bytes(setting), self.request.profile
        secs = self._sending.all_reduce_secs(own, size, stride)
        host_secs = own / profile.host_bytes_per_sec if setting.offload else 0.0
        if setting.zero == 3:
            if setting.offload:
                host_secs += own / profile.host_memory_bytes_per_sec
            each = FETCHES * secs + HOST_TRIPS * host_secs / size
            hidden = FETCHING * microbatch_secs if setting.prefetch else 0.0
            return self.request.microbatches(setting.microbatch) * max(0.0, each - hidden)
        return secs * (HIDDEN if setting.reductions else 1.0) + 2 * host_secs

    def num_bytes(self, setting: Setting) -> float:
        """What the fullest device needs."""
        return self._holding.num_bytes(setting)

    def smaller_bytes(self, setting: Setting, peak_bytes: float, changed: Setting) -> float:
        """The same of a changed setting, given what was seen without the change."""
        return self._holding.smaller_bytes(setting, peak_bytes, changed)

    @cached_property
    def _graph(self) -> Graph:
        return self.request.graph_of(self.request.samples[0])

    @cached_property
    def _traits(self) -> Traits:
        return traits_of(self._graph)

    @cached_property
    def _sending(self) -> Sending:
        return Sending(self._traits, self.request.topology)

    @cached_property
    def _holding(self) -> Holding:
        return Holding(self.request)

    @cached_property
    def _working(self) -> Working:
        return Working(self.request)

    @cached_property
    def _per_host(self) -> int:
        outer = self.request.topology.levels[1:2]
        return len(outer[0].groups[0]) if outer else len(self.request.devices)


def _again(setting: Setting) -> float:
    """What is computed again; a co-shard's parts are, so that one is kept at a time."""
    in_parts = AGAIN[Keep.BLOCK_INPUTS] if setting.coshard > 1 else 1.0
    return max(AGAIN[setting.keep], AGAIN_HEAVY if setting.heavy else in_parts)
