"""Guess: what a step takes and needs, from the setting alone; it sets the order of looking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.bounds import Bounds
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

FETCHING, FETCHING_CUT = 0.9, 0.3
"""The share of a microbatch in which weights are fetched, if that is ahead of their use; and the
same under tensor parallel, whose sums wait for it. In steps of GPT-3 and Swin on two and four hosts
that were simulated it is 0.8 to 0.9, and 0.15 to 0.35."""

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

AGAIN_HEAVY, AGAIN_PARTS = 1.15, 0.3
"""The same of a model of which the blocks that keep most are in parts; and what is added to what a
block takes if all are: parts are computed again one by one, after their block."""

GATHERS = 2
"""How often a microbatch gathers fetched weights: in the forward and in the backward."""

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
        shared, dealt = self._holding.shared_bytes(setting), self._holding.dealt_bytes(setting)
        profile = self.request.profile
        # An all-reduce is a scatter and a gather.
        gather = self._sending.all_reduce_secs(shared, size, stride) / 2
        scatter = self._gradient_share * gather
        if setting.zero == 3:
            each = GATHERS * gather + scatter
            if setting.offload:
                trip = 1 / profile.host_bytes_per_sec + 1 / profile.host_memory_bytes_per_sec
                each += HOST_TRIPS * trip * (shared / size + dealt)
            most = FETCHING if setting.tp == 1 else FETCHING_CUT
            hidden = most * microbatch_secs if setting.prefetch else 0.0
            longer = self._longer_secs(setting, each, hidden)
            return self.request.microbatches(setting.microbatch) * longer
        # States that are shared update pieces of weights, which are gathered as they are.
        secs = scatter + (gather if setting.zero else scatter)
        host_secs = (shared + dealt) / profile.host_bytes_per_sec if setting.offload else 0.0
        return secs * (HIDDEN if setting.reductions else 1.0) + 2 * host_secs

    def _longer_secs(self, setting: Setting, secs: float, hidden_secs: float) -> float:
        """What fetching takes longer than it is hidden, block by block.

        Only computing of its neighbours hides what is fetched of a block, and in many models of
        images the first blocks compute longest, while the last have most weights.
        """
        num_bytes = self._holding.layer_bytes(setting)
        each = secs / max(1, sum(num_bytes))
        shares = zip(num_bytes, self._working.layer_shares, strict=True)
        return sum(max(0.0, each * fetched - hidden_secs * share) for fetched, share in shares)

    def num_bytes(self, setting: Setting) -> float:
        """What the fullest device needs."""
        return self._holding.num_bytes(setting)

    def smaller_bytes(self, setting: Setting, peak_bytes: float, changed: Setting) -> float:
        """The same of a changed setting, given what was seen without the change."""
        return self._holding.smaller_bytes(setting, peak_bytes, changed)

    @cached_property
    def _gradient_share(self) -> float:
        """Bytes of gradients, which are summed in the masters' dtype, over those of weights."""
        bounds = Bounds(self.request)
        return bounds.gradient_bytes / max(1.0, bounds.trained_bytes[0])

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
    if setting.heavy:
        return max(AGAIN[setting.keep], AGAIN_HEAVY)
    if setting.coshard > 1:
        return AGAIN[setting.keep_coshard or setting.keep] + AGAIN_PARTS
    return AGAIN[setting.keep]
