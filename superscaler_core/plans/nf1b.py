"""nF1B: a pipeline of a model that is recycled; 3F1B with two passes before the trained one."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Keep, Placement, Plan
from superscaler_core.plans.pieces.along import along, shares
from superscaler_core.plans.pieces.axial import EVOFORMER, Cut, axial_loops, axially
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.schedules import nf1b as order


def nf1b(
    plan: Plan,
    *,
    recycle: int = 2,
    pp: int = 0,
    dp: int = 1,
    microbatches: int = 8,
    modules: Sequence[Cut] = EVOFORMER,
    keep: Keep = Keep.EVERYTHING,
    sizes: Sequence[int] = (),
) -> None:
    """Run ``recycle`` recycling passes between the forwards and backwards of 1F1B.

    A microbatch passes all stages ``recycle + 1`` times, the last stage's result goes to the first
    ``recycle`` times, and the gradient goes back once. Memory per device: as in ``dap_pipeline``;
    recycling passes keep nothing.

    Args:
        plan: to fill; its graph is captured with ``recycled``.
        recycle: passes of a microbatch before the one that is trained.
        pp: stages; as many as devices if 0.
        dp: groups of a stage's devices among which the batch is cut; in a group ``dap`` cuts.
        microbatches: number per step, at least that of stages; each as large as the captured batch.
        modules, keep: as in ``dap``.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Raises:
        PlanError: ``pp * dp`` does not divide the devices, or the model recycles nothing.
        ScheduleError: there are fewer microbatches than stages.

    Source: SuperScaler, 3F1B for AlphaFold2.
    """
    pp = pp or len(plan.devices)
    num = shares(plan, pp=pp, dp=dp)
    loops = axial_loops(plan.graph, tuple(modules)) if num > 1 else {}
    for stage in stages_of_blocks(plan, pp, sizes):
        for op in stage.ops:
            plan.op_trans(op, along(plan, op, dp, plan.dims.batch))
            plan.op_trans(op, axially(plan, op, num, loops))
            plan.op_assign(op, plan.devices[stage.index * dp * num :][: dp * num])
    plan.op_order(order(pp, microbatches, recycle), Placement.even(plan.devices, pp))
    plan.keep(keep)
