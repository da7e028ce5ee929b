"""Estimate: the time and memory of a step under a setting, from the costs of its blocks.

Nothing is compiled, so an estimate takes a thousandth of an evaluation. It only orders these: what
a search returns was compiled and simulated in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from operator import mul

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import find_blocks
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.block_costs import BlockCosts
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.order import Order, order_of
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.stage_cost import Stage, Stages
from superscaler_core.planners.search.request import Request
from superscaler_core.schedules import ScheduleError


@dataclass(frozen=True, slots=True)
class Figures:
    """Time and memory of a step; infinite if the model cannot be cut so.

    Attributes:
        secs: seconds.
        num_bytes: bytes on the fullest device.
    """

    secs: float = inf
    num_bytes: float = inf


@dataclass(frozen=True, eq=False)
class Estimate:
    """Estimates of one request's settings; each is computed once.

    Law (tests/superscaler_core/planners/auto/test_estimate.py): for one stage of equal parts and
    without overlap, the time is that of the simulator.
    """

    request: Request

    def of(self, setting: Setting) -> Figures:
        """The figures of a setting."""
        if setting not in self._known:
            try:
                with paused_collector():
                    self._known[setting] = self._find(setting)
            except (PlanError, ScheduleError, rv.LayoutError):
                self._known[setting] = Figures()
        return self._known[setting]

    def _find(self, setting: Setting) -> Figures:
        num = self.request.microbatches(setting.microbatch)
        order = order_of(setting, num // (2 if setting.duplex else 1))
        stages = self._stages(setting, order)
        secs = self._secs(setting, order, stages)
        return Figures(secs, _num_bytes(setting, order, stages))

    def _stages(self, setting: Setting, order: Order) -> list[Stage]:
        """The stages of a setting; equal stages are computed once."""
        sizes, blocks = self._sizes(setting), self._blocks.of(setting)
        if sum(sizes) != len(blocks.layers):
            raise PlanError(f"{setting}: the model has {len(blocks.layers)} blocks, not {sizes}.")
        whole = replace(setting, keep=Keep.EVERYTHING, coshard=1, heavy=False)
        held = self._blocks.of(whole) if order.is_split else blocks
        replicas = setting.dp // self._blocks.replicas(setting)
        pairs = zip(blocks.stages(sizes), held.stages(sizes), strict=True)
        return [self._known_stages.of(setting, mine, kept, replicas) for mine, kept in pairs]

    def _sizes(self, setting: Setting) -> Sequence[int]:
        key = setting.family, setting.pp, setting.chunks, setting.schedule
        if key not in self._known_sizes:
            request = self.request
            filling = Filling(setting, request.profile, request.recycle, 1)
            blocks = find_blocks(request.graph_of(request.samples[0]))
            self._known_sizes[key] = filling.sizes(blocks)
        return self._known_sizes[key]

    def _secs(self, setting: Setting, order: Order, stages: Sequence[Stage]) -> float:
        """Seconds of a step.

        A worker begins when the first microbatch has come to one of its stages, computes all
        microbatches, and ends before the last one has gone back to the first stage. So the step
        takes at least the three times together, for every worker, in whatever order.
        """
        num = self.request.microbatches(setting.microbatch)
        turns, longest = self.request.recycle, 0.0
        for mine in order.stages:
            before = min(mine)
            filling = sum(stage.forward_secs for stage in stages[:before])
            # Recomputation apart from the backward needs no gradient, so none waits for it.
            again = 0 if setting.apart else 1
            draining = sum(s.backward_secs + again * s.again_secs for s in stages[:before])
            # Only gradients of inputs, half of a backward, go back before the weights' gradients.
            draining /= 2 if order.is_split else 1
            busy = sum(stages[i].secs + turns * stages[i].forward_secs for i in mine)
            longest = max(longest, filling + num * busy / order.copies + draining)
        return longest + max(sum(stages[i].step_secs for i in mine) for mine in order.stages)

    # --- what is computed once ------------------------------------------------------------------

    @cached_property
    def _known(self) -> dict[Setting, Figures]:
        return {}

    @cached_property
    def _known_sizes(self) -> dict[tuple[str, int, int, str], Sequence[int]]:
        return {}

    @cached_property
    def _blocks(self) -> BlockCosts:
        return BlockCosts(self.request)

    @cached_property
    def _known_stages(self) -> Stages:
        return Stages(self.request.costs(self.request.samples[0]), self.request.devices)


@lru_cache(maxsize=1)
def estimate_of(request: Request) -> Estimate:
    """The estimates of a request, which its space of settings and its search share."""
    return Estimate(request)


def _num_bytes(setting: Setting, order: Order, stages: Sequence[Stage]) -> float:
    """Bytes on the fullest worker."""
    most = 0.0
    for mine, held in zip(order.stages, order.held, strict=True):
        each = [stages[i].kept_bytes for i in mine]
        kept = max(sum(map(mul, moment, each)) for moment in held)
        working = max(stages[i].working_bytes for i in mine)
        stored = sum(stages[i].stored_bytes for i in mine)
        most = max(most, stored + (kept + working) * (2 if setting.duplex else 1))
    return most
