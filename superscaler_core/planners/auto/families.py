"""Families: ways to cut ops; each has its layouts of the devices, and fills a plan by a setting."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import ClassVar

from superscaler_core.cost import DeviceProfile
from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import Request
from superscaler_core.evaluation.shortened import even
from superscaler_core.graph.blocks import Blocks
from superscaler_core.plan import Overlap, Plan
from superscaler_core.planners.auto.balance import balanced_sizes
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits, heavy_blocks
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

    The profile balances the stages; ``recycle`` is forwards without gradient per microbatch, and
    ``microbatches`` are those of a step.
    """

    setting: Setting
    profile: DeviceProfile
    recycle: int
    microbatches: int
    decides_keep: ClassVar[bool] = True

    def __call__(self, plan: Plan, microbatches: int = 0, sizes: Sequence[int] = ()) -> None:
        """Fill a plan, of a shortened step if it is given microbatches or blocks of every stage.

        Raises:
            PlanError: the model cannot be cut by this setting.
            ScheduleError: the schedule does not take these counts.
        """
        chosen, num = self.setting, microbatches or self.microbatches
        overlap = Overlap(**chosen.options("prefetch", "reductions", "moves", "duplex"))
        sizes = tuple(sizes) or self.sizes(plan.blocks)
        FAMILIES[chosen.family].fill(plan, self, num // overlap.num_halves, sizes)
        if chosen.zero:
            shard_storage(plan)
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


@dataclass(frozen=True)
class Family:
    """A way to cut ops.

    Attributes:
        lay_out: the layouts of a request's devices; none if the model does not allow the family.
        fill: cuts the ops of a plan, and sets its schedule with microbatches and stage sizes.
    """

    lay_out: Callable[[Request, Traits], Iterator[Setting]]
    fill: Callable[[Plan, Filling, int, tuple[int, ...]], None]


def layouts_of(request: Request, traits: Traits) -> Iterator[Setting]:
    """A setting for every layout of a request's devices that the model allows."""
    for name, family in FAMILIES.items():
        for setting in family.lay_out(request, traits):
            yield replace(setting, family=name)


def powers(most: int) -> list[int]:
    """Powers of two up to a number, ascending."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _hybrid(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    sides = [n for n in range(1, num + 1) if num % n == 0]
    for tp, pp in product(sides, sides):
        if num % (tp * pp) or (tp > 1 and not traits.has_features) or pp > traits.num_layers:
            continue
        yield Setting(dp=num // (tp * pp), tp=tp, pp=pp)


def _fill_hybrid(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
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
        coshard_blocks=heavy_blocks(plan.blocks) if chosen.heavy else None,
        keep_coshard=chosen.keep_coshard,
        sizes=sizes,
        **chosen.options(*names),
    )


def _axial(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    for pp, dp in product(powers(num), powers(num)) if traits.is_axial else ():
        if num % (pp * dp) == 0:
            yield Setting(dp=dp, tp=num // (pp * dp), pp=pp)


def _fill_axial(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
    chosen = filling.setting
    options = {**chosen.options("pp", "dp", "keep")}
    if filling.recycle:
        nf1b(plan, recycle=filling.recycle, microbatches=num, sizes=sizes, **options)
    else:
        pp, dp = options.pop("pp"), options.pop("dp")
        axial_stages(plan, one_f_one_b(pp, num), dp, EVOFORMER, sizes=sizes, **options)


def _interlaced(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    is_possible = traits.has_blocks and traits.has_lookups and traits.has_features
    for tp in powers(num // 2) if is_possible and not request.recycle else ():
        if num % tp == 0 and num // tp <= traits.num_layers:
            yield Setting(tp=tp, pp=num // tp, slack=1)


def _fill_interlaced(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
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


def _spatial(request: Request, traits: Traits) -> Iterator[Setting]:
    num = len(request.devices)
    for rows in powers(num)[1:] if traits.has_images and not request.recycle else ():
        if num % rows == 0:
            yield Setting(dp=num // rows, tp=rows)


def _fill_spatial(plan: Plan, filling: Filling, num: int, sizes: tuple[int, ...]) -> None:
    spatial(plan, rows=filling.setting.tp)
    plan.op_order(one_f_one_b(1, num))
    plan.keep(filling.setting.keep)


FAMILIES: Mapping[str, Family] = {
    "hybrid": Family(_hybrid, _fill_hybrid),
    "axial": Family(_axial, _fill_axial),
    "interlaced": Family(_interlaced, _fill_interlaced),
    "spatial": Family(_spatial, _fill_spatial),
}
"""All families by name."""


def named(text: str) -> Setting | None:
    """The setting that ``auto`` names so, such as ``hybrid dp=2 tp=2 pp=1 samples=4 zero=1``.

    None for a text that begins with no family, or has no choices.

    Raises:
        PlanError: a choice is not known, or its value has another form.
    """
    family, *words = text.split()
    if not words or family not in FAMILIES:
        return None
    said = {word.partition("=")[0] for word in words}
    if missing := [name for name in ("dp", "tp", "pp", "samples") if name not in said]:
        raise PlanError(f"{text!r}: a name of search says {', '.join(missing)} too.")
    return Setting.parse(text)
