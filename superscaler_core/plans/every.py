"""Every: options that every plan takes besides its own, applied to what the plan decided.

Each is a row of one table. A plan whose function has an option of the same name decides itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from superscaler_core.checks import at_least
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import find_blocks
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Overlap, Plan
from superscaler_core.plans.pieces.dealt import deal_experts, deal_storage
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.schedules import one_f_one_b

Options = Mapping[str, Any]

PARTS = {"block": "blocks", "features": "features", "expert": "experts", "embedding": "embedding"}
"""Options that name parts of the model, which the search by structure does not find, each with its
parameter of ``find_blocks``. They count before the plan decides."""

OVERLAPPED = Overlap(prefetch=1, reductions=True, moves=True)
"""What ``overlap=True`` means."""


def _experts(plan: Plan, given: Options) -> None:
    """``experts``: whether to deal experts out to the replicas, instead of cutting their batch.

    A number deals them out to so many neighbouring devices, groups of which are data parallel.
    """
    if given["experts"]:
        deal_experts(plan, 0 if given["experts"] is True else given["experts"])


def _microbatches(plan: Plan, given: Options) -> None:
    """``microbatches``: number per step, each as large as the captured batch."""
    num = given["microbatches"]
    at_least(1, microbatches=num)
    if plan.schedule is None:
        plan.op_order(one_f_one_b(1, num))
    elif plan.schedule.num_microbatches != num:
        raise PlanError(
            f"microbatches={num}: the plan has a schedule of its own, of "
            f"{plan.schedule.num_microbatches} microbatches."
        )


def _zero(plan: Plan, given: Options) -> None:
    """``zero``, ``shard`` and ``whole``: how devices that read the same weights store them.

    A level of ``zero`` cuts, among these devices, 1 master weights and states, 2 gradients too, 3
    weights too. With ``shard``, each group of so many of them does this, and groups replicate each
    other. With ``whole``, each device gets whole parameters in place of a piece of all.
    """
    level, shard, is_whole = (given.get(name, 0) for name in ("zero", "shard", "whole"))
    at_least(0, shard=shard)
    if level not in range(4):
        raise PlanError(f"zero={level}: it is 1 (states), 2 (gradients), 3 (weights), or 0 (none).")
    if (shard or is_whole) and not level:
        said = f"shard={shard}" if shard else "whole=true"
        raise PlanError(
            f"{said} is about storage that this option cuts: add zero=1, "
            "zero=2 or zero=3, to a plan that does not cut it, as data_parallel."
        )
    if level:
        (deal_storage if is_whole else shard_storage)(plan, shard)
    if level == 2:
        plan.reduce_grads(*plan.blocks.groups)
    if level == 3:
        plan.unshard(*plan.blocks.groups)


def _keep(plan: Plan, given: Options) -> None:
    """``keep``: which values of the blocks are kept for the backward."""
    plan.keep(given["keep"])


def _overlap(plan: Plan, given: Options) -> None:
    """``overlap``: which communication runs while devices compute."""
    chosen = given["overlap"]
    plan.overlap = chosen if isinstance(chosen, Overlap) else OVERLAPPED if chosen else Overlap()


COMMON: Mapping[tuple[str, ...], Callable[[Plan, Options], None]] = {
    ("experts",): _experts,
    ("microbatches",): _microbatches,
    ("zero", "shard", "whole"): _zero,
    ("keep",): _keep,
    ("overlap",): _overlap,
}
"""The other options of every plan, in the order in which they are applied to a plan."""

NAMES = (*PARTS, *(name for names in COMMON for name in names))
"""The names of all options of every plan."""


def fill(plan: Plan, function: Callable[..., None], options: Options) -> None:
    """Fill a plan by a function, its own options, and those of every plan.

    What the model puts into ``torch.utils.checkpoint`` is recomputed, unless ``keep`` says what is
    kept, or the function decides it.

    Raises:
        PlanError: the plan cannot have an option.
    """
    own = signature(function).parameters
    common = {name: options[name] for name in NAMES if name in options and name not in own}
    if parts := {PARTS[name]: value for name, value in common.items() if name in PARTS}:
        plan.blocks = find_blocks(plan.graph, **parts)
    function(plan, **{name: value for name, value in options.items() if name not in common})
    for names, apply in COMMON.items():
        if common.keys() & {*names}:
            apply(plan, common)
    if "keep" not in options and not getattr(function, "decides_keep", False):
        _recompute_as_model(plan)


def _recompute_as_model(plan: Plan) -> None:
    """Recompute the groups of ops that the model checkpoints, if the plan recomputes nothing."""
    if plan.runs_again or plan.has_groups:
        return
    groups: dict[int, list[Op]] = {}
    for op in plan.graph.ops:
        if op.checkpoint:
            groups.setdefault(op.checkpoint, []).append(op)
    plan.recompute_regions(*groups.values())
