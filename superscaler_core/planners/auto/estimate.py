"""Estimate: the time and memory of a step under a setting, from the costs of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from operator import mul

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from superscaler_core.cost import CostModel
from superscaler_core.cost.comm_cost import TICKS_PER_SEC, CommCost, ticks
from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import Request
from superscaler_core.graph.blocks import find_blocks
from superscaler_core.known import remembers
from superscaler_core.plan import Device, Keep
from superscaler_core.planners.auto.block_costs import BlockCosts
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.model_cost import BlockCost, ModelCost, Output
from superscaler_core.planners.auto.order import Order, WorkerRoute, makespan, orders_of
from superscaler_core.planners.auto.sending import sending_costs
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.stage_cost import GatherTimes, StageForm, Stages
from superscaler_core.schedules import ActionKind, ScheduleError


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of a step, and bytes on the fullest device; infinite if the cut is impossible."""

    secs: float = inf
    num_bytes: float = inf


Costs = Callable[[Setting], ModelCost]
"""The costs of a model's blocks under a setting."""


@dataclass(frozen=True, slots=True)
class _Priced:
    """What an estimate is made of: the schedule, the blocks of every stage, and the stages."""

    orders: tuple[Order, ...]
    rows: Sequence[Sequence[BlockCost]]
    stages: Sequence[StageForm]


@dataclass(frozen=True, eq=False)
class Estimate:
    """Estimates of one request's settings; each is computed once.

    Nothing is compiled, so an estimate takes a thousandth of an evaluation, and only orders these.

    Laws (tests/superscaler_core/planners/auto/test_estimate.py): for one stage of equal parts and
    without overlap, the time is that of the simulator; ``near`` of the microbatch sizes between
    which it interpolates is at most the time.
    """

    request: Request

    def of(self, setting: Setting) -> Figures:
        """The figures of a setting."""
        return self._figures(setting, False)

    def near(self, setting: Setting) -> Figures:
        """The figures from interpolated costs of blocks, with the least time of their schedule."""
        return self._figures(setting, True)

    @remembers()
    def _figures(self, setting: Setting, is_near: bool) -> Figures:
        blocks = self._blocks
        costs, secs = (blocks.near, self._least_secs) if is_near else (blocks.of, self._secs)
        try:
            with paused_collector():
                priced = self._priced(setting, costs)
        except (PlanError, ScheduleError, rv.LayoutError):
            return Figures()
        return Figures(secs(setting, priced), _num_bytes(setting, priced.orders[0], priced.stages))

    def _least_secs(self, setting: Setting, priced: _Priced) -> float:
        """The least seconds of a step, in whatever order workers run their actions.

        A worker begins when the first microbatch has come to one of its stages, and computes all of
        them. If a backward computes all gradients, the last one then goes back to the first stage.
        Of two workers with copies of the same stages, one computes at least half.
        """
        (order, *_), stages, longest = priced.orders, priced.stages, 0.0
        num = self.request.microbatches(setting.microbatch)
        for mine in order.stages:
            before = stages[: min(mine)]
            busy = sum(stages[i].secs + self.request.recycle * stages[i].forward_secs for i in mine)
            filling = sum(stage.forward_secs for stage in before)
            again = 0 if setting.apart else 1
            draining = sum(stage.backward_secs + again * stage.again_secs for stage in before)
            draining *= not order.is_split
            longest = max(longest, filling + num * busy / order.copies + draining)
        return longest + _weights_secs(order, stages)

    def _priced(self, setting: Setting, costs: Costs) -> _Priced:
        num = self.request.microbatches(setting.microbatch) // _halves(setting)
        orders = orders_of(setting, num, self.request.recycle)
        rows = self._rows(setting, costs)
        keeping_all = replace(setting, keep=Keep.EVERYTHING, coshard=1, heavy=False)
        held = self._rows(keeping_all, costs) if orders[0].is_split else rows
        return _Priced(orders, rows, self._stages(setting, orders[0], rows, held))

    def _secs(self, setting: Setting, priced: _Priced) -> float:
        num = self.request.microbatches(setting.microbatch) // _halves(setting)
        times = [self._step_secs(setting, order, priced) for order in priced.orders]
        secs = times[0]
        if len(times) > 1:
            most, fewer = (order.schedule.num_microbatches for order in priced.orders)
            secs += (num - most) * (times[0] - times[1]) / (most - fewer)
        secs += _weights_secs(priced.orders[0], priced.stages)
        return max(secs, self._least_secs(setting, priced))

    def _rows(self, setting: Setting, costs: Costs) -> list[tuple[BlockCost, ...]]:
        sizes = self._sizes(Setting(**setting.options("family", "pp", "chunks", "schedule")))
        blocks = costs(setting)
        if sum(sizes) != len(blocks.layers):
            raise PlanError(f"{setting}: the model has {len(blocks.layers)} blocks, not {sizes}.")
        return blocks.stages(sizes)

    def _stages(
        self,
        setting: Setting,
        order: Order,
        rows: Sequence[Sequence[BlockCost]],
        held: Sequence[Sequence[BlockCost]],
    ) -> list[StageForm]:
        """The stages of a setting, given their blocks, and those with what is held in memory."""
        replicas = order.copies * setting.dp // self._blocks.replicas(setting)
        workers = order.schedule.workers_of(0)
        home = tuple(d for worker in workers for d in self._devices(setting, worker))
        stages = Stages(self._gathers, setting, replicas, home)
        return [stages.of(*pair) for pair in zip(rows, held, strict=True)]

    def _devices(self, setting: Setting, worker: int) -> tuple[Device, ...]:
        num = setting.dp * setting.tp
        return tuple(self.request.devices[worker * num : (worker + 1) * num])

    @remembers()
    def _sizes(self, setting: Setting) -> Sequence[int]:
        """Blocks of every stage of a setting that has default values besides."""
        request = self.request
        blocks = find_blocks(request.graph_of(request.samples[0]))
        return Filling(setting, request.profile, request.recycle, 1).sizes(blocks)

    def _step_secs(self, setting: Setting, order: Order, priced: _Priced) -> float:
        """Seconds of the actions of an order."""
        durations: dict[tuple[ActionKind, int], int] = {}
        for i, stage in enumerate(priced.stages):
            again = 0.0 if setting.apart else stage.again_secs
            backward = stage.backward_secs + again
            for kind, secs in {
                ActionKind.RECYCLE: stage.forward_secs,
                ActionKind.FORWARD: stage.forward_secs,
                ActionKind.BACKWARD: backward,
                ActionKind.INPUTS: backward - stage.weights_secs,
                ActionKind.WEIGHTS: stage.weights_secs,
                ActionKind.RECOMPUTE: stage.again_secs,
            }.items():
                durations[kind, i] = _halves(setting) * ticks(secs)
        comm_costs = {route: self._comm_costs(setting, priced, route) for route in order.routes}
        return (
            makespan(order.events, order.schedule.num_workers, durations, comm_costs)
            / TICKS_PER_SEC
        )

    def _comm_costs(
        self, setting: Setting, priced: _Priced, route: WorkerRoute
    ) -> Sequence[CommCost]:
        workers = (route.dst, route.src) if route.is_back else (route.src, route.dst)
        src, dst = (self._devices(setting, worker) for worker in workers)
        outputs = priced.rows[route.stage][-1].outputs
        moved = (each for each in outputs if each.has_grad or not route.is_back)
        return [comm for each in moved for comm in self._sent(each, src, dst, route.is_back)]

    # --- what is computed once ------------------------------------------------------------------

    @cached_property
    def _blocks(self) -> BlockCosts:
        return BlockCosts(self.request)

    @cached_property
    def _gathers(self) -> GatherTimes:
        return GatherTimes(self._costs)

    @remembers()
    def _sent(
        self, output: Output, src: tuple[Device, ...], dst: tuple[Device, ...], is_back: bool
    ) -> tuple[CommCost, ...]:
        return sending_costs(self._costs, output, self.request.devices, src, dst, is_back)

    @cached_property
    def _costs(self) -> CostModel:
        return self.request.costs(self.request.samples[0])


@lru_cache(maxsize=1)
def estimate_of(request: Request) -> Estimate:
    """The estimates of a request, which its space of settings and its search share."""
    return Estimate(request)


def _halves(setting: Setting) -> int:
    """The microbatches that run as one."""
    return 2 if setting.duplex else 1


def _weights_secs(order: Order, stages: Sequence[StageForm]) -> float:
    """Seconds that weights and gradients take at the ends of a step, on the slowest worker."""
    return max(sum(stages[i].step_secs for i in mine) for mine in order.stages)


def _num_bytes(setting: Setting, order: Order, stages: Sequence[StageForm]) -> float:
    """Bytes on the fullest worker."""
    most = 0.0
    for mine, held in zip(order.stages, order.held, strict=True):
        each = [stages[i].kept_bytes for i in mine]
        kept = max(sum(map(mul, moment, each)) for moment in held)
        working = max(stages[i].working_bytes for i in mine)
        stored = sum(stages[i].stored_bytes for i in mine)
        most = max(most, stored + (kept + working) * _halves(setting))
    return most
