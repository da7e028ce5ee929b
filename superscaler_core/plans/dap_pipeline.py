"""Dynamic axial parallelism inside the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Keep, Placement, Plan
from superscaler_core.plans.pieces.along import shares
from superscaler_core.plans.pieces.axial import EVOFORMER, Cut, spread_axially
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.schedules import one_f_one_b


def dap_pipeline(
    plan: Plan,
    *,
    pp: int = 2,
    dp: int = 1,
    microbatches: int = 8,
    modules: Sequence[Cut] = EVOFORMER,
    zero1: bool = False,
    keep: Keep = Keep.EVERYTHING,
    sizes: Sequence[int] = (),
) -> None:
    """Stages of blocks on ``pp`` groups of devices, which share rows and columns as ``dap`` does.

    A microbatch has the all-to-alls and all-gathers of ``dap`` in every block, and sends alignment
    and pairs from stage to stage, cut, and their gradients back. Memory per device: weights of its
    blocks; activations as in ``one_f_one_b``, cut as those of ``dap``.

    Args:
        plan: to fill.
        pp: stages.
        dp: groups of a stage's devices among which the batch is cut.
        microbatches: number per step, each as large as the captured batch.
        modules, zero1, keep: as in ``dap``.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Raises:
        PlanError: ``pp * dp`` does not divide the devices, or as in ``dap``.
    """
    num = shares(plan, pp=pp, dp=dp) * dp
    for stage in stages_of_blocks(plan, pp, sizes):
        devices = plan.devices[stage.index * num :][:num]
        spread_axially(plan, stage.ops, devices, dp, modules)
    if zero1:
        shard_storage(plan)
    plan.keep(keep)
    plan.op_order(one_f_one_b(pp, microbatches), Placement.even(plan.devices, pp))
