"""Interleaved 1F1B: several stages per device, which shortens the idle time at both ends."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Placement, Plan
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.schedules import interleaved as order


def interleaved(
    plan: Plan, *, microbatches: int = 8, chunks: int = 2, sizes: Sequence[int] = ()
) -> None:
    """Deal stages of blocks out to the devices in turn, ``chunks`` to each.

    A microbatch sends the hidden state ``chunks`` times as often as under ``one_f_one_b``, and
    devices are idle for 1/``chunks`` as long. Memory per device: 1/D of the weights; activations
    of 1 + (D - 1)/(D * ``chunks``) times what 1F1B holds on its first stage.

    Args:
        plan: to fill.
        microbatches: of a step, each as large as what was captured.
        chunks: stages a device.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021.
    """
    num = len(plan.devices)
    for stage in stages_of_blocks(plan, num * chunks, sizes):
        for op in stage.ops:
            plan.op_assign(op, plan.devices[stage.index % num])
    plan.op_order(order(num, microbatches, chunks), Placement.even(plan.devices, num))
