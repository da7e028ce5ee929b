"""Guess: estimate time and memory of a step from the setting alone, to order the looks."""

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
"""Communication of plans that cut rows and columns, over the computing time.

``SENT`` is per device of a group within a host, ``WIDE`` in all for a group across hosts.
"""

HIDDEN = 0.5
"""Share of gradient reduction that computing hides if the two overlap."""

FETCHING, FETCHING_CUT = 0.9, 0.3
"""Shares of a microbatch's computing that hide prefetches, without and with tensor parallelism.

The all-reduces of tensor parallelism wait for prefetches. In simulated steps of GPT-3 and Swin on
two and four hosts, the shares are 0.8 to 0.9, and 0.15 to 0.35.
"""

AGAIN: Mapping[Keep, float] = {
    Keep.EVERYTHING: 1.0,
    Keep.ATTENTION_ONLY: 1.1,
    Keep.SEGMENT_INPUTS: 1.3,
    Keep.BLOCK_INPUTS: 1.34,
    Keep.STAGE_INPUT: 1.35,
}
"""Factors on the computing time for recomputation; a forward is a third of it."""

FORWARD = 1 / 3
"""Time of a forward without gradient over that of a forward and a backward."""

WAITING, WAITING_INSIDE, WAITING_APART = 1.15, 1.3, 1.1
"""Factors on the time of an interlaced pipeline, whose halves of a step last as the longer pass.

Without recomputation, with recomputation inside the backwards, and apart. In simulated steps of
mBART with 4, 8 and 16 stages they are 1.18, 1.18 to 1.35, and 1.10 to 1.13.
"""

AGAIN_HEAVY, AGAIN_PARTS = 1.15, 0.3
"""Recomputation by co-shard: the least factor for heavy blocks, and the addition for all blocks.

The addition is needed because each part is recomputed once more after its block.
"""

GATHERS = 2
"""Gathers of fetched weights per microbatch: one in the forward and one in the backward."""

HOST_TRIPS = 3
"""Transfers between device and host per microbatch, if weights are stored on the host.

The host's memory is read or written as often, because the host accumulates gradients.
"""


@dataclass(frozen=True, eq=False)
class Guess:
    """Estimates (not bounds) for one request, from its smallest microbatches.

    An op runs at the speed of the part that one device computes, and is launched once per pass of a
    microbatch. The communication is that of the shipped plans, by its bytes (``Sending``).
    """

    request: Request

    def secs(self, setting: Setting) -> float:
        """Seconds of a step."""
        request = self.request
        num = request.microbatches(setting.microbatch)
        work = self._working.sample_secs(setting.samples, setting.tp * setting.coshard)
        launches = num / setting.pp * PASSES * len(self._graph.ops) * request.profile.launch_secs
        alone = work * request.batch / len(request.devices) + launches * setting.coshard
        again = _again(setting) + request.recycle * FORWARD
        busy = alone * again + num / setting.pp * self._cut_secs(setting)
        bubble = (setting.pp - 1) / (num * setting.chunks)
        whole = busy * (1 + bubble) * _waiting(setting)
        return whole + self._weights_secs(setting, busy / num)

    def _cut_secs(self, setting: Setting) -> float:
        """Seconds of a microbatch's communication in all stages, due to the cuts of ops."""
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
        """Seconds per step of communicating weights and gradients that computing does not hide."""
        _, size, stride = replicas(setting)
        shared, dealt = self._holding.shared_bytes(setting), self._holding.own_expert_bytes(setting)
        profile = self.request.profile
        # An all-reduce is a reduce-scatter and an all-gather of equal time.
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
        # With sharded states, updated pieces of weights are gathered in the weights' dtype.
        secs = scatter + (gather if setting.zero else scatter)
        host_secs = (shared + dealt) / profile.host_bytes_per_sec if setting.offload else 0.0
        return secs * (1 - HIDDEN if setting.reductions else 1.0) + 2 * host_secs

    def _longer_secs(self, setting: Setting, secs: float, hidden_secs: float) -> float:
        """Seconds of fetching weights that computing does not hide, summed over blocks.

        Only the computing of neighbouring blocks hides the fetching of a block. In many image
        models, the first blocks compute longest and the last ones have most weights.
        """
        num_bytes = self._holding.layer_bytes(setting)
        each = secs / max(1, sum(num_bytes))
        shares = zip(num_bytes, self._working.layer_shares, strict=True)
        return sum(max(0.0, each * fetched - hidden_secs * share) for fetched, share in shares)

    def num_bytes(self, setting: Setting) -> float:
        """Bytes on the fullest device."""
        return self._holding.num_bytes(setting)

    def smaller_bytes(self, setting: Setting, peak_bytes: float, changed: Setting) -> float:
        """Bytes on the fullest device under ``changed``, if ``setting`` needs ``peak_bytes``."""
        return self._holding.smaller_bytes(setting, peak_bytes, changed)

    @cached_property
    def _gradient_share(self) -> float:
        """Bytes of gradients over bytes of weights; gradients have the master weights' dtype."""
        bounds = Bounds(self.request)
        return bounds.gradient_bytes / max(1, bounds.weight_bytes)

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


def _waiting(setting: Setting) -> float:
    """The factor of waiting at the borders of an interlaced pipeline's steps."""
    if setting.family != "interlaced":
        return 1.0
    if setting.keep is Keep.EVERYTHING:
        return WAITING
    return WAITING_APART if setting.apart else WAITING_INSIDE


def _again(setting: Setting) -> float:
    """The factor of recomputation; co-shard always recomputes its parts, to keep one at a time."""
    if setting.heavy:
        return max(AGAIN[setting.keep], AGAIN_HEAVY)
    if setting.coshard > 1:
        return AGAIN[setting.keep_coshard or setting.keep] + AGAIN_PARTS
    return AGAIN[setting.keep]
