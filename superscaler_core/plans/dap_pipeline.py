"""Dynamic axial parallelism inside the stages of a pipeline."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.axial import EVOFORMER, axial_stages
from superscaler_core.plans.blocks import BLOCK
from superscaler_core.schedules import one_f_one_b


def dap_pipeline(
    plan: Plan,
    *,
    pp: int = 2,
    dp: int = 1,
    microbatches: int = 8,
    modules: str = EVOFORMER,
    zero1: bool = False,
    recompute: bool = False,
    block: str = BLOCK,
    sizes: str = "",
) -> None:
    """Stages of blocks on ``pp`` groups of devices, which share rows and columns as ``dap`` does.

    A microbatch has the all-to-alls and all-gathers of ``dap`` in every block, and sends alignment
    and pairs from stage to stage, cut, and their gradients back. Memory a device: weights of its
    blocks; activations as of ``one_f_one_b``, cut as those of ``dap``.

    Args:
        plan: to fill.
        pp: stages.
        dp: groups of a stage's devices among which the batch is cut.
        microbatches: of a step, each as large as what was captured.
        modules, zero1, recompute: as of ``dap``.
        block, sizes: as of ``blocks.stages_of_blocks``.

    Raises:
        PlanError: ``pp * dp`` does not divide the devices, or as of ``dap``.
    """
    axial_stages(
        plan, pp, dp, modules=modules, zero1=zero1, recompute=recompute, block=block, sizes=sizes
    )
    plan.op_order(one_f_one_b(pp, microbatches))
