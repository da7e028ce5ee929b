"""Sending: the calls that move the results of a stage to the next, priced as a program's are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import rvdcomm as rv
from superscaler_core.cost import CostModel
from superscaler_core.cost.wire import Wire
from superscaler_core.plan import Device
from superscaler_core.planners.auto.model_cost import Output
from superscaler_core.program.side import Side, View
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

    def wires(
        self,
        outputs: Sequence[Output],
        src: tuple[Device, ...],
        dst: tuple[Device, ...],
        is_back: bool,
    ) -> tuple[Wire, ...]:
        """The calls that move results of a stage, or their gradients back.

        Args:
            outputs: the results.
            src, dst: devices of the stage and of the next one.
            is_back: whether gradients move, from ``dst`` to ``src``.
        """
        moved = (each for each in outputs if each.has_grad or not is_back)
        return tuple(wire for each in moved for wire in self._wires(each, src, dst, is_back))

    @cached_property
    def _wires(self) -> Callable[..., tuple[Wire, ...]]:
        return cache(self._find_wires)

    def _find_wires(
        self, output: Output, src: tuple[Device, ...], dst: tuple[Device, ...], is_back: bool
    ) -> tuple[Wire, ...]:
        ends = self._replicated(output.src, src), self._replicated(output.dst, dst)
        start, end = ends[::-1] if is_back else ends
        num = len(src) // len(output.src.shards)
        legs = transfers(start, end.whole, (num, *output.shape), output.dtype)
        method, wires = self.costs.communication, self.costs.wires
        return tuple(wires.of([leg], method) for leg in legs if not leg.is_idle)

    def _replicated(self, side: Side, devices: tuple[Device, ...]) -> Side:
        """An end on devices of as many replicas as fit, each of which has samples of its own."""
        priced = {device: i for i, device in enumerate(self.devices[: len(side.shards)])}
        views = (
            View(
                devices[row * len(priced) + priced[view.device]],
                rv.Box((row, *view.box.lo), (row + 1, *view.box.hi)),
                view.summand,
            )
            for row in range(len(devices) // len(priced))
            for view in side.views
        )
        return Side(side.num_summands, tuple(sorted(views)))
