"""Sending: the calls that move the results of a stage to the next, priced as a program's are."""

from __future__ import annotations

from collections.abc import Sequence

import rvdcomm as rv
from superscaler_core.cost import CostModel
from superscaler_core.cost.comm_cost import CommCost
from superscaler_core.materialize.sharding import HeldBox, Sharding
from superscaler_core.materialize.transfer import transfers
from superscaler_core.plan import Device
from superscaler_core.planners.auto.model_cost import Output


def sending_costs(
    costs: CostModel,
    output: Output,
    priced: Sequence[Device],
    src: tuple[Device, ...],
    dst: tuple[Device, ...],
    is_back: bool,
) -> tuple[CommCost, ...]:
    """The calls that move a result of a stage to the next one, or its gradient back.

    The result was priced on the first of the devices ``priced``.
    """
    ends = _replicated(output.src, priced, src), _replicated(output.dst, priced, dst)
    start, end = ends[::-1] if is_back else ends
    num = len(src) // len(output.src.shards)
    return tuple(
        costs.comm_costs.of([sub_transfer], costs.communication)
        for sub_transfer in transfers(start, end.whole, (num, *output.shape), output.dtype)
        if not sub_transfer.is_idle
    )


def _replicated(
    sharding: Sharding, priced: Sequence[Device], devices: tuple[Device, ...]
) -> Sharding:
    """An end on devices of as many replicas as fit, each of which has samples of its own."""
    places = {device: i for i, device in enumerate(priced[: len(sharding.shards)])}
    views = (
        HeldBox(
            devices[row * len(places) + places[view.device]],
            rv.Box((row, *view.box.lo), (row + 1, *view.box.hi)),
            view.summand,
        )
        for row in range(len(devices) // len(places))
        for view in sharding.views
    )
    return Sharding(sharding.num_summands, tuple(sorted(views)))
