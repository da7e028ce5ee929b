"""ZeRO 1: data parallel with the optimizer's states cut among the devices."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.data_parallel import data_parallel
from superscaler_core.plans.pieces.storage import shard_storage


def zero1(plan: Plan) -> None:
    """Data parallel whose optimizer updates 1/N of every parameter on each device.

    A step reduces and scatters the gradients, and gathers the weights: together the volume of one
    all-reduce. Memory per device: all weights and gradients, 1/N of master weights and states.

    Source: Rajbhandari et al., ZeRO, 2019.
    """
    data_parallel(plan)
    shard_storage(plan)
