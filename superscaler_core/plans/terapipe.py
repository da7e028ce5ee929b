"""TeraPipe: a pipeline of slices of the sequence, for causal models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from superscaler_core.errors import PlanError
from superscaler_core.graph.token_slices import token_slices
from superscaler_core.plan import Axis, Placement, Plan
from superscaler_core.plans.pieces.along import shares, spread
from superscaler_core.plans.pieces.grid_stages import num_workers
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.schedules.terapipe import terapipe as order


def terapipe(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 1,
    slices: int = 4,
    lengths: Sequence[int] = (),
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Send every sequence through the stages slice by slice, so that few sequences suffice.

    A slice sends its hidden state from stage to stage, and its gradient back: in all what a
    microbatch sends under ``one_f_one_b``. Keys and values stay on their device. Memory per group:
    1/pp of the weights; on stage s activations of at most pp - s microbatches, and the keys and
    values up to the end of each slice. The plan's graph becomes one of slices.

    Args:
        plan: to fill.
        slices: of every sequence, of as many tokens or nearly.
        lengths: tokens of every slice in place of these, such as ``planners.slices`` finds: later
            slices are shorter, as they see more keys.
        pp, tp, microbatches, zero1, sizes: as in ``one_f_one_b``.

    Raises:
        PlanError: a token of the model reads later ones, or an op's numbers depend on the place of
            its tokens; ``lengths`` do not add up to the sequence; ``tp * pp`` does not divide the
            devices.

    Source: Li et al., TeraPipe, ICML 2021.
    """
    num = num_workers(plan, pp, tp)
    each = shares(plan, tp=tp, pp=num) * tp
    tokens, inner = plan.blocks.tokens, plan.blocks.inner if tp > 1 else ()
    ends = _ends(plan, slices, tuple(lengths))
    stages = [stage.ops for stage in stages_of_blocks(plan, num, sizes)]
    dims = plan.dims
    graph, firsts = token_slices(
        plan.graph, lambda op: [i for dim in tokens for i in dims.ids(op, dim)], ends, stages
    )
    plan.rewrite(graph)
    for stage in plan.pipeline(firsts[1:]):
        worker = stage.index // len(ends)
        devices = plan.devices[worker * each :][:each]
        axes = Axis(each // tp, (plan.dims.batch,)), Axis(tp, inner)
        spread(plan, stage.ops, devices, *axes)
    plan.op_order(order(num, microbatches, len(ends)), Placement.even(plan.devices, num))
    if zero1:
        shard_storage(plan)


def _ends(plan: Plan, slices: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The token behind each slice."""
    found = {t.shape[1] for t in plan.graph.inputs if len(t.shape) > 1}
    length = min(found)
    lengths = lengths or tuple(
        length * (i + 1) // slices - length * i // slices for i in range(max(slices, 1))
    )
    if len(found) > 1 or min(lengths) < 1 or sum(lengths) != length:
        raise PlanError(
            f"slices of {list(lengths)} tokens: {plan.graph.name} has sequences of "
            f"{sorted(found)} tokens; slices have at least one each, and add up to the length that "
            "all inputs share."
        )
    return tuple(accumulate(lengths))
