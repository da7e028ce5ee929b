"""TeraPipe: a pipeline of slices of the sequence, for causal models."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import TokenSlices
from superscaler_core.graph.token_slices import sequence_lengths
from superscaler_core.plan import Axis, Placement, Plan
from superscaler_core.plans import plan_row
from superscaler_core.plans.option_texts import counts
from superscaler_core.plans.pieces.along import shares, spread
from superscaler_core.plans.pieces.grid_stages import num_workers
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.row import OptionReader
from superscaler_core.published.terapipe.schedule import terapipe as order


@plan_row(
    readers={"lengths": OptionReader(counts, "whole numbers with commas between, such as 40,24")}
)
def terapipe(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 1,
    slices: int = 4,
    lengths: Sequence[int] = (),
    sizes: Sequence[int] = (),
) -> None:
    """Send every sequence through the stages slice by slice, so that few sequences suffice.

    Slices send their hidden states from stage to stage, and gradients back: together what a
    microbatch sends under ``one_f_one_b``. Keys and values stay on their device. Memory per group:
    1/pp of the weights; on stage s activations of at most pp - s microbatches, and the keys and
    values up to the end of each slice. The plan's graph becomes one of slices.

    Args:
        plan: to fill.
        slices: number per sequence, with nearly equally many tokens.
        lengths: tokens of every slice, instead of equal ones; for example from ``planners.slices``:
            later slices are shorter, as they see more keys.
        pp, tp, microbatches, sizes: as in ``one_f_one_b``.

    Raises:
        PlanError: a token of the model reads later ones, or an op's numbers depend on the place of
            its tokens; ``slices`` is below 1; ``lengths`` do not add up to the sequence;
            ``tp * pp`` does not divide the devices.

    Source: Li et al., TeraPipe, ICML 2021.
    """
    num = num_workers(plan, pp, tp)
    each = shares(plan, tp=tp, pp=num) * tp
    inner = plan.blocks.inner if tp > 1 else ()
    lengths = tuple(lengths) or _even(min(sequence_lengths(plan.graph)), slices)
    stages = stages_of_blocks(plan, num, sizes)
    names = tuple(stage.ops[0].name for stage in stages[1:])
    firsts = plan.slice_tokens(TokenSlices(lengths, names))
    for stage in plan.pipeline(firsts[1:]):
        worker = stage.index // len(lengths)
        devices = plan.devices[worker * each :][:each]
        axes = Axis(each // tp, (plan.dims.batch,)), Axis(tp, inner)
        spread(plan, stage.ops, devices, *axes)
    plan.op_order(order(num, microbatches, len(lengths)), Placement.even(plan.devices, num))


def _even(length: int, num: int) -> tuple[int, ...]:
    """The tokens of ``num`` nearly equal slices."""
    if num < 1:
        raise PlanError(f"slices={num}: a sequence is one slice or more.")
    return tuple(length * (i + 1) // num - length * i // num for i in range(num))
