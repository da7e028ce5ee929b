"""Fill: from the stages that a planner chose to a plan that runs."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.plan import Keep, Placement, Plan
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel
from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.pricing import layers_of
from superscaler_core.schedules import one_f_one_b


def fill(
    plan: Plan,
    *,
    cut: StageCut,
    microbatches: int,
    vocabulary: bool = False,
    keep: Keep = Keep.EVERYTHING,
) -> None:
    """An sProgram: the stages of a cut in the order of 1F1B, each layer with its degrees.

    Args:
        plan: a plan of the model that was cut.
        cut: a cut whose stages are runs of layers.
        microbatches: microbatches in a step, each as large as the captured one.
        vocabulary: as in ``tensor_parallel``.
        keep: what the layers keep for the backward.

    Raises:
        PlanError: a stage is no run of layers, or the model has another number of layers.
    """
    if not cut.has_runs:
        raise PlanError(
            f"{plan.graph.name}: a plan's stages are runs of layers, one after another, and those "
            f"of this cut are not:\n{cut}"
        )
    stages_of_blocks(plan, len(cut.stages), cut.sizes)
    layers = layers_of(plan.blocks)
    for stage in cut.stages:
        for layer, degrees in zip(stage.layers, stage.degrees, strict=True):
            tensor_parallel(
                plan, layers[layer], stage.devices, degrees.tensor, vocabulary=vocabulary
            )
    order = one_f_one_b(len(cut.stages), microbatches)
    plan.op_order(order, Placement(tuple(stage.devices for stage in cut.stages)))
    plan.keep(keep)
