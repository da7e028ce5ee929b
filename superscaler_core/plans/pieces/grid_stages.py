"""Stages on grids: every stage on a group of devices, a grid of batch times inner features."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Placement, Plan
from superscaler_core.plans.pieces.along import shares
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel
from superscaler_core.schedules import interleaved, one_f_one_b


def grid_stages(
    plan: Plan,
    tp: int,
    pp: int,
    microbatches: int,
    *,
    chunks: int = 1,
    sequence: bool = False,
    vocabulary: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Stages of blocks on ``pp`` groups of devices, in the order of 1F1B.

    Args:
        plan: to fill.
        tp: devices that share a stage's inner features; the batch is cut among the rest.
        pp: groups of devices, each of which has ``chunks`` stages.
        microbatches: of a step.
        chunks: stages of a group, dealt out in turn.
        sequence, vocabulary: as in ``tensor_parallel``.
        sizes: as in ``stages_of_blocks``.

    Raises:
        PlanError: ``tp * pp`` does not divide the devices.
    """
    num = shares(plan, tp=tp, pp=pp) * tp
    for stage in stages_of_blocks(plan, pp * chunks, sizes):
        first = stage.index % pp * num
        devices = plan.devices[first : first + num]
        tensor_parallel(plan, stage.ops, devices, tp, sequence=sequence, vocabulary=vocabulary)
    order = interleaved(pp, microbatches, chunks) if chunks > 1 else one_f_one_b(pp, microbatches)
    plan.op_order(order, Placement.even(plan.devices, pp))
