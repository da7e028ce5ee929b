"""Co-shard: heads and features are cut, but the parts run one after another on one device."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.pieces.along import along
from superscaler_core.plans.pieces.grid_stages import grid_stages
from superscaler_core.plans.pieces.in_turn import in_turn, places, turns_of
from superscaler_core.plans.pieces.inner_runs import ChosenBlocks, inner_runs, with_norm
from superscaler_core.schedules import one_f_one_b


def coshard(
    plan: Plan,
    *,
    parts: int = 2,
    blocks: ChosenBlocks = None,
    tp: int = 1,
    pp: int = 1,
    microbatches: int = 1,
    keep: Keep = Keep.EVERYTHING,
    sizes: Sequence[int] = (),
) -> None:
    """Cut attention and MLP into ``tp * parts`` parts, with ``parts`` of them per device.

    A device runs its parts one after another, each from the first linear map to the last, and sums
    their results. Its communication is the same as without co-shard. Only the input of an
    attention's or MLP's norm is kept: the backward recomputes the norm, and then each part in its
    turn. Memory per device: the inner activations of these blocks, such as the attention matrix,
    of one part; the input of every attention and MLP.

    Args:
        plan: to fill. If its ops have devices already, their parts are cut on those devices.
        parts: parts of every attention and every MLP per device.
        blocks: numbers of the blocks to cut, such as ``range(4)``, or ``Modules`` in them; all if
            None.
        tp, pp, microbatches, keep, sizes: as in ``hybrid``; used only for a new plan.

    Raises:
        PlanError: as in ``hybrid``; heads or features cannot be cut into ``tp * parts``.

    Source: the SuperScaler paper.
    """
    if not plan.is_assigned:
        grid_stages(plan, one_f_one_b(pp, microbatches), tp, sizes=sizes)
    for dim, run, block in inner_runs(plan, parts, blocks):
        for op in run:
            devices = places(plan, op, parts)
            plan.op_trans(op, along(plan, op, parts, dim))
            plan.op_assign(op, devices)
        turns = turns_of(plan, run, parts)
        for first, then in in_turn(plan, turns):
            plan.op_order(first, then)
        plan.recompute(*turns)
        plan.recompute_regions(with_norm(plan, run, block))
    plan.keep(keep)
