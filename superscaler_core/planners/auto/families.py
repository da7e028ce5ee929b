"""Families: fill a plan by a setting, with the shipped plans."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from superscaler_core.cost import DeviceProfile
from superscaler_core.graph.blocks import Blocks
from superscaler_core.plan import Overlap, Plan
from superscaler_core.planners.auto.balance import balanced_sizes
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import heavy_blocks
from superscaler_core.planners.search.shortened import even
from superscaler_core.plans.hybrid import hybrid
from superscaler_core.plans.interlaced import interlaced
from superscaler_core.plans.nf1b import nf1b
from superscaler_core.plans.pieces.axial import EVOFORMER, axial_stages
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.plans.spatial import spatial
from superscaler_core.schedules import SCHEDULES, one_f_one_b
from superscaler_core.schedules import nf1b as turns

STAGES_A_WORKER = {"zero-bubble-v": 2, "dualpipe-v": 2}
"""Stages per worker of the schedules that have several without the option ``chunks``."""


@dataclass(frozen=True)
class Filling:
    """An sProgram that fills plans by a setting.

    Attributes:
        setting: the decisions.
        profile: profile of every device, to balance the stages.
        recycle: forwards without gradient per microbatch.
        microbatches: microbatches per step.
    """

    setting: Setting
    profile: DeviceProfile
    recycle: int
    microbatches: int

    def __call__(self, plan: Plan, microbatches: int = 0, sizes: Sequence[int] = ()) -> None:
        """Fill a plan.

        Args:
            plan: the plan to fill.
            microbatches: microbatches of a shortened step; those of a step if 0.
            sizes: blocks of every stage; balanced if empty.

        Raises:
            PlanError: the model cannot be cut by this setting.
            ScheduleError: the schedule does not take these counts.
        """
        chosen, num = self.setting, microbatches or self.microbatches
        overlap = Overlap(**chosen.options("prefetch", "reductions", "moves", "duplex"))
        sizes = tuple(sizes) or self.sizes(plan.blocks)
        FAMILIES[chosen.family](plan, self, num // overlap.num_halves, sizes)
        if chosen.zero == 3:
            plan.unshard(*plan.blocks.groups)
        if chosen.offload:
            plan.store_on_host()
        plan.overlap = overlap

    def sizes(self, blocks: Blocks) -> tuple[int, ...]:
        """Blocks of every stage; empty if there are fewer blocks than stages."""
        chosen = self.setting
        if chosen.family == "interlaced":
            return _behind_lookups(blocks, chosen.pp)
        num_stages = chosen.pp * chosen.chunks * STAGES_A_WORKER.get(chosen.schedule, 1)
        return balanced_sizes(blocks.graph, num_stages, self.profile, blocks)


Family = Callable[[Plan, Filling, int, tuple[int, ...]], None]


def _hybrid(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
    chosen = filling.setting
    schedule = SCHEDULES[chosen.schedule]
    if filling.recycle:
        schedule = partial(turns, recycle=filling.recycle)
    names = ("tp", "pp", "chunks", "sequence", "vocabulary", "experts", "keep", "coshard")
    hybrid(
        plan,
        microbatches=num,
        schedule=schedule,
        apart=chosen.apart,
        zero1=chosen.zero > 0,
        coshard_blocks=heavy_blocks(plan.blocks) if chosen.heavy else None,
        keep_coshard=chosen.keep_coshard,
        sizes=sizes,
        **chosen.options(*names),
    )


def _axial(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
    chosen = filling.setting
    options: dict[str, Any] = {**chosen.options("pp", "dp", "keep"), "zero1": chosen.zero > 0}
    if filling.recycle:
        nf1b(plan, recycle=filling.recycle, microbatches=num, sizes=sizes, **options)
    else:
        pp, dp = options.pop("pp"), options.pop("dp")
        axial_stages(plan, one_f_one_b(pp, num), dp, EVOFORMER, sizes=sizes, **options)


def _interlaced(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
    options = filling.setting.options("tp", "slack", "vocabulary", "keep", "apart")
    interlaced(plan, microbatches=num, **options)


def _behind_lookups(blocks: Blocks, num_stages: int) -> tuple[int, ...]:
    """Blocks of every stage of ``interlaced``, which cuts those behind each look-up evenly."""
    starts = [ops[0].index for ops in blocks.all]
    firsts = [op.index for op in blocks.lookups if op.index < starts[-1]]
    behind = [len(starts) - bisect_left(starts, first) for first in firsts]
    counts = [a - b for a, b in pairwise([*behind, 0])]
    per_lookup = num_stages // len(firsts)
    return tuple(size for count in counts for size in even(count, per_lookup))


def _spatial(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
    spatial(plan, rows=filling.setting.tp)
    plan.op_order(one_f_one_b(1, num))
    if filling.setting.zero:
        shard_storage(plan)
    plan.keep(filling.setting.keep)


FAMILIES: Mapping[str, Family] = {
    "hybrid": _hybrid,
    "axial": _axial,
    "interlaced": _interlaced,
    "spatial": _spatial,
}
"""The function of each family, which cuts the ops of a plan and sets its schedule."""
