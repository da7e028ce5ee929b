"""nF1B: a pipeline of a model that is recycled; 3F1B with two turns before the trained one."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.plan import Plan
from superscaler_core.plans.axial import EVOFORMER, axial_stages
from superscaler_core.plans.blocks import BLOCK
from superscaler_core.schedules import ScheduleError
from superscaler_core.schedules import nf1b as order


def nf1b(
    plan: Plan,
    *,
    recycle: int = 2,
    pp: int = 0,
    dp: int = 1,
    microbatches: int = 8,
    modules: str = EVOFORMER,
    zero1: bool = False,
    recompute: bool = False,
    block: str = BLOCK,
    sizes: str = "",
) -> None:
    """Run ``recycle`` turns without gradient between the forwards and backwards of 1F1B.

    A microbatch is sent from stage to stage ``recycle + 1`` times, what the last stage makes of it
    to the first ``recycle`` times, and its gradient back once. Memory a device: as of
    ``dap_pipeline``; turns without gradient keep nothing.

    Args:
        plan: to fill; its graph is captured with ``recycled``.
        recycle: turns of a microbatch before the one that is trained.
        pp: stages; as many as devices if 0.
        dp: groups of a stage's devices among which the batch is cut; in a group ``dap`` cuts.
        microbatches: of a step, each as large as what was captured; as many as stages at least.
        modules, zero1, recompute: as of ``dap``.
        block, sizes: as of ``blocks.stages_of_blocks``.

    Raises:
        PlanError: ``pp * dp`` does not divide the devices, there are fewer microbatches than
            stages, or the model recycles nothing.

    Source: SuperScaler, 3F1B for AlphaFold2.
    """
    stages = pp or len(plan.devices)
    axial_stages(
        plan, stages, dp, modules=modules, zero1=zero1, recompute=recompute, block=block,
        sizes=sizes,
    )  # fmt: skip
    try:
        plan.op_order(order(stages, microbatches, recycle))
    except ScheduleError as error:
        raise PlanError(f"microbatches={microbatches} of {stages} stages: {error}") from None
