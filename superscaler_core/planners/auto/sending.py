"""Sending: the calls that move the results of a stage to the next, priced as a program's are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import rvdcomm as rv
from superscaler_core.cost import CostModel
from superscaler_core.cost.comm_cost import CommCost
from superscaler_core.plan import Device
from superscaler_core.planners.auto.model_cost import Output
from superscaler_core.program.sharding import HeldBox, Sharding
from superscaler_core.program.transfer import transfers


@dataclass(frozen=True, eq=False)
class Sending:
    """The transfers between the stages of one request.

    Attributes:
        costs: the cost functions of the request.
        devices: devices of the request; stages are priced on the first of them.
    """

    costs: CostModel
    devices: Sequence[Device]

    def comm_costs(
        self,
        outputs: Sequence[Output],
        src: tuple[Device, ...],
        dst: tuple[Device, ...],
        is_back: bool,
    ) -> tuple[CommCost, ...]:
        """The calls that move results of a stage, or their gradients back.

        Args:
            outputs: the results.
            src, dst: devices of the stage and of the next one.
            is_back: whether gradients move, from ``dst`` to ``src``.
        """
        moved = (each for each in outputs if each.has_grad or not is_back)
        return tuple(comm for each in moved for comm in self._comm_costs(each, src, dst, is_back))

    @cached_property
    def _comm_costs(self) -> Callable[..., tuple[CommCost, ...]]:
        return cache(self._find_comm_costs)

    def _find_comm_costs(
        self, output: Output, src: tuple[Device, ...], dst: tuple[Device, ...], is_back: bool
    ) -> tuple[CommCost, ...]:
        ends = self._replicated(output.src, src), self._replicated(output.dst, dst)
        start, end = ends[::-1] if is_back else ends
        num = len(src) // len(output.src.shards)
        sub_transfers = transfers(start, end.whole, (num, *output.shape), output.dtype)
        method, comm_costs = self.costs.communication, self.costs.comm_costs
        return tuple(
            comm_costs.of([sub_transfer], method)
            for sub_transfer in sub_transfers
            if not sub_transfer.is_idle
        )

    def _replicated(self, sharding: Sharding, devices: tuple[Device, ...]) -> Sharding:
        """An end on devices of as many replicas as fit, each of which has samples of its own."""
        priced = {device: i for i, device in enumerate(self.devices[: len(sharding.shards)])}
        views = (
            HeldBox(
                devices[row * len(priced) + priced[view.device]],
                rv.Box((row, *view.box.lo), (row + 1, *view.box.hi)),
                view.summand,
            )
            for row in range(len(devices) // len(priced))
            for view in sharding.views
        )
        return Sharding(sharding.num_summands, tuple(sorted(views)))
