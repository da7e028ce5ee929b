"""Interlaced pipeline: embeddings cut among all devices, layers in stages of some of them."""

from __future__ import annotations

from superscaler_core.plan import Keep, Placement, Plan
from superscaler_core.plans.pieces.along import along
from superscaler_core.plans.pieces.lookup_stages import lookup_stages
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel
from superscaler_core.schedules import interlaced as order


def interlaced(
    plan: Plan,
    *,
    tp: int = 1,
    microbatches: int = 8,
    slack: int = 0,
    apart: bool = False,
    rows: bool = False,
    vocabulary: bool = False,
    keep: Keep = Keep.EVERYTHING,
) -> None:
    """Look words up on all devices, and run the blocks in stages on ``tp`` devices each.

    Every look-up (an encoder's, a decoder's) is a stage on all devices, followed by equally many
    stages of blocks. A microbatch gathers looked-up words on the next group (``tp`` times the
    hidden state in all) and scatters their gradient (once the hidden state). Else it communicates
    as under ``megatron`` and ``one_f_one_b``; an encoder's result goes to all stages of a decoder.
    Memory per device: 1/N of the embedding; for blocks as under ``one_f_one_b``.

    Args:
        plan: to fill.
        tp: devices of a group, which share inner features as under ``megatron``.
        microbatches: number per step, each as large as the captured batch.
        slack: steps by which look-ups run ahead of the blocks, and behind them in the backward; 0
            is the table of the paper's code, where all devices meet at every step's border.
        apart: recompute beside the forwards, not inside the backwards, as the paper's code does.
        rows: cut the embedding by rows (words), not by columns. Then every device has a partial
            sum of all that is looked up and needs all of its gradient: about N times the hidden
            state each way.
        vocabulary: cut a head along the words, among a group, as ``megatron`` does.
        keep: which values of the blocks, without look-ups, are kept for the backward.

    Raises:
        PlanError: the groups of ``tp`` devices are no multiple of the look-ups, or a look-up has
            fewer blocks behind it than groups.

    Source: algorithm 2 of SuperScaler (Lin et al., 2023).
    """
    embedding = plan.dims.of(plan.blocks.embedding.name, 0 if rows else 1)
    lookups, stages = lookup_stages(plan, tp)
    groups = (plan.devices[i : i + tp] for i in range(0, len(plan.devices), tp))
    for stage in plan.stages:
        if stage in stages:
            tensor_parallel(plan, stage.ops, next(groups), tp, vocabulary=vocabulary)
            continue
        for op in stage.ops:
            plan.op_trans(op, along(plan, op, len(plan.devices), embedding))
            plan.op_assign(op, plan.devices)
    num = len(stages)
    schedule = order(num, microbatches, len(lookups), slack, apart=apart)
    plan.op_order(schedule, Placement.even(plan.devices, num))
    plan.keep(keep, [set(ops).difference(lookups) for ops in plan.blocks.all])
