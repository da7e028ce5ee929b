"""Axial: modules cut along rows or columns of two-dimensional data, each as suits it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.modules import Modules
from superscaler_core.graph.once import once_per_graph
from superscaler_core.plan import Device, Keep, Placement, Plan
from superscaler_core.plan.op_trans import Transformation, replicate, split
from superscaler_core.plans.pieces.along import along, shares
from superscaler_core.plans.pieces.follow import followed
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Cut:
    """Modules that are cut along one dim.

    Attributes:
        modules: the modules.
        first: dim of the tensor that the module reads first.
        then: dim of all others, and of its results; ``first`` if None.
    """

    modules: Modules
    first: int
    then: int | None = None


EVOFORMER = (
    Cut(Modules("*.msa_row"), 1),
    Cut(Modules("*.msa_col"), 2),
    Cut(Modules("*.msa_transition"), 2),
    Cut(Modules("*.outer"), 2, 1),
    Cut(Modules("*.tri_out"), 1),
    Cut(Modules("*.tri_in"), 2),
    Cut(Modules("*.tri_start"), 1),
    Cut(Modules("*.tri_end"), 2),
    Cut(Modules("*.pair_transition"), 1),
)
"""The dim of ``[batch, s, r, c]`` or ``[batch, r, r, c]`` that each module treats independently.

Source: FastFold's dynamic axial parallelism, as SuperScaler's study lists it.
"""


@once_per_graph
def axial_loops(graph: Graph, cuts: tuple[Cut, ...]) -> Mapping[Op, str]:
    """The loop along which each op is cut; ops in no module are cut along dim 1.

    Raises:
        PlanError: there are no such modules.
    """
    fits: dict[Op, tuple[Op | None, Cut]] = {}
    for cut in cuts:
        instances = cut.modules.instances(graph)
        if not instances:
            raise PlanError(
                f"{graph.name} has no modules {cut.modules}; the plan is for Evoformers: say "
                "modules=(Cut(Modules('PATTERN'), DIM), ...) if they are named otherwise."
            )
        # Earlier cuts take precedence.
        fits = {op: (ops[0], cut) for ops in instances for op in ops} | fits
    loops: dict[Op, str] = {}
    between = None, Cut(Modules(), 1)
    for (_, cut), ops in groupby(graph.ops, lambda op: fits.get(op, between)):
        loops |= followed(tuple(ops), cut.first, cut.first if cut.then is None else cut.then)
    return loops


def axially(plan: Plan, op: Op, num: int, loops: Mapping[Op, str]) -> Transformation:
    """Cut an op among ``num`` devices along its loop, or replicate it if it has none.

    Raises:
        PlanError: the loop has fewer iterations than there are devices.
    """
    if op not in loops:
        return replicate(num)
    if op.sizes[loops[op]] < num:
        raise PlanError(
            f"{plan.graph.name} cut along {loops[op]} of {op.name} into {num}: it has "
            f"{op.sizes[loops[op]]}; use at most as many devices, or data parallel groups of them."
        )
    return split(loops[op], num)


def axial_stages(
    plan: Plan,
    schedule: Schedule,
    dp: int,
    cuts: Sequence[Cut],
    *,
    keep: Keep = Keep.EVERYTHING,
    sizes: Sequence[int] = (),
) -> None:
    """Stages of blocks on groups of devices, which share rows and columns inside a stage.

    Args:
        plan: to fill.
        schedule: a schedule with one stage per worker.
        dp: groups of a stage's devices among which the batch is cut.
        cuts: the dim along which each module is cut.
        keep: which values of the blocks are kept for the backward.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Raises:
        PlanError: the stages times ``dp`` do not divide the devices, or as in ``axially``.
    """
    num = shares(plan, pp=schedule.num_stages, dp=dp) * dp
    for stage in stages_of_blocks(plan, schedule.num_stages, sizes):
        devices = plan.devices[stage.index * num :][:num]
        spread_axially(plan, stage.ops, devices, dp, cuts)
    plan.op_order(schedule, Placement.even(plan.devices, schedule.num_stages))
    plan.keep(keep)


def spread_axially(
    plan: Plan, ops: Iterable[Op], devices: Sequence[Device], dp: int, cuts: Sequence[Cut]
) -> None:
    """Cut ops along the batch among ``dp`` groups of devices, and in a group axially."""
    loops = axial_loops(plan.graph, tuple(cuts)) if len(devices) > dp else {}
    for op in ops:
        plan.op_trans(op, along(plan, op, dp, plan.dims.batch))
        plan.op_trans(op, axially(plan, op, len(devices) // dp, loops))
        plan.op_assign(op, devices)
