"""Hybrid: data, tensor and pipeline parallel at once, with what saves memory besides."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.plan import Plan
from superscaler_core.plans.blocks import BLOCK, blocks_of, stages_of_blocks
from superscaler_core.plans.colocate import colocate
from superscaler_core.plans.storage import shard_storage
from superscaler_core.plans.tensor_parallel import tensor_parallel
from superscaler_core.schedules import interleaved, one_f_one_b


def hybrid(
    plan: Plan,
    *,
    tp: int = 1,
    pp: int = 1,
    microbatches: int = 8,
    chunks: int = 1,
    sequence: bool = False,
    vocabulary: bool = False,
    zero1: bool = False,
    recompute: bool = False,
    rerun: bool = False,
    coshard: int = 1,
    coshard_blocks: str = "",
    rerun_coshard: bool = True,
    block: str = BLOCK,
    sizes: str = "",
    features: str = "",
) -> None:
    """Stages of blocks on ``pp`` groups of devices, each a grid of batch times inner features.

    Devices are numbered with the tensor parallel ones innermost, and stages outermost. What is
    communicated, and what memory it takes, is that of the plans that it is made of.

    Args:
        plan: to fill.
        tp: devices that share a stage's inner features, as of ``megatron``.
        pp: groups of devices that have a stage each (``chunks`` stages); the batch is cut among
            the ``len(devices) / (tp * pp)`` that are left.
        microbatches: of a step, each as large as what was captured.
        chunks: stages a group of devices, as of ``interleaved``.
        sequence: cut what is between tensor parallel maps along the sequence.
        vocabulary, features: as of ``megatron``.
        zero1: cut master weights and states along the data parallel devices.
        recompute: keep of every block only what enters it, and its sums over devices.
        rerun: keep only what enters it, and communicate inside it again in the backward.
        coshard: parts of every attention and MLP that a device runs one after another, as of
            ``colocate``.
        coshard_blocks: numbers of the blocks with such parts, such as ``"0-3,8"``; all if empty.
        rerun_coshard: whether ``rerun`` is of those blocks too. They then keep their input alone,
            not that of each attention and MLP, and compute attention three times, not twice.
        block, sizes: as of ``blocks.stages_of_blocks``.

    Raises:
        PlanError: ``tp * pp`` does not divide the devices.
    """
    num = len(plan.devices)
    if min(tp, pp, chunks) < 1 or num % (tp * pp):
        raise PlanError(
            f"hybrid of tp={tp} times pp={pp} on {num} devices: both are at least 1, and their "
            f"product {tp * pp} has to divide {num}; the rest is data parallel."
        )
    per_stage = num // pp
    for stage in stages_of_blocks(plan, pp * chunks, block=block, sizes=sizes):
        first = stage.index % pp * per_stage
        tensor_parallel(
            plan,
            stage.ops,
            plan.devices[first : first + per_stage],
            tp,
            sequence=sequence,
            vocabulary=vocabulary,
            features=features,
        )
    order = interleaved(pp, microbatches, chunks) if chunks > 1 else one_f_one_b(pp, microbatches)
    plan.op_order(order)
    if zero1:
        shard_storage(plan)
    if recompute:
        plan.recompute(*blocks_of(plan.graph, block))
    # Behind what looks at whole parts, such as who stores what.
    cut = colocate(plan, coshard, blocks=coshard_blocks, block=block, features=features)
    if rerun:
        kept = () if rerun_coshard else cut
        blocks = enumerate(blocks_of(plan.graph, block))
        plan.rerun(*(ops for number, ops in blocks if number not in kept))
