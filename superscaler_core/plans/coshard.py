"""Co-shard: heads and features are cut, and the parts stay on one device, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.pieces.along import along
from superscaler_core.plans.pieces.grid_stages import grid_stages
from superscaler_core.plans.pieces.in_turn import in_turn, places, turns_of
from superscaler_core.plans.pieces.inner_runs import ChosenBlocks, inner_runs, with_norm


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
    """Cut attention and MLP into ``tp * parts``, ``parts`` of them on each of ``tp`` devices.

    A device runs its parts one after another, each from the first linear map to the last, and what
    they make adds up. It sends what it sends without co-shard. Of an attention or MLP what enters
    its norm alone is kept: its backward makes the norm again, and each part when it comes to it.
    Memory a device: of the inner activations of these blocks, such as the matrix of attention,
    those of one part; the input of every attention and MLP.

    Args:
        plan: to fill; one whose ops have devices is gone on with, and its parts are cut where they
            are.
        parts: of every attention and every MLP on a device.
        blocks: numbers of the blocks that are cut so, such as ``range(4)``, or ``Modules`` in them;
            all if None.
        tp, pp, microbatches, keep, sizes: as of ``hybrid``; the grid is of new plans alone.

    Raises:
        PlanError: as of ``hybrid``; heads or features cannot be cut into ``tp * parts``.

    Source: the SuperScaler paper.
    """
    if not plan.is_assigned:
        grid_stages(plan, tp, pp, microbatches, sizes=sizes)
    for dim, run, block in inner_runs(plan, parts, blocks):
        for op in run:
            devices = places(plan, op, parts)
            plan.op_trans(op, along(plan, op, parts, dim))
            plan.op_assign(op, devices)
        turns = turns_of(plan, run, parts)
        for first, then in in_turn(plan, turns):
            plan.op_order(first, then)
        plan.recompute(*turns)
        plan.rerun(with_norm(plan, run, block))
    plan.keep(keep)
