"""Dynamic axial parallelism inside the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.pieces.axial import EVOFORMER, Cut, axial_stages
from superscaler_core.schedules import one_f_one_b


def dap_pipeline(
    plan: Plan,
    *,
    pp: int = 2,
    dp: int = 1,
    microbatches: int = 8,
    modules: Sequence[Cut] = EVOFORMER,
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
        modules, keep: as in ``dap``.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Raises:
        PlanError: ``pp * dp`` does not divide the devices, or as in ``dap``.
    """
    order = one_f_one_b(pp, microbatches)
    axial_stages(plan, order, dp, modules, keep=keep, sizes=sizes)
