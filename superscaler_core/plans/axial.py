"""Axial: modules cut along rows or columns of two-dimensional data, each as suits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, groupby

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.op_trans import replicate, split
from superscaler_core.plans.blocks import BLOCK, blocks_of, stages_of_blocks
from superscaler_core.plans.follow import followed
from superscaler_core.plans.storage import shard_storage

EVOFORMER = (
    "*.msa_row:1, *.msa_col:2, *.msa_transition:2, *.outer:2>1, *.tri_out:1, *.tri_in:2, "
    "*.tri_start:1, *.tri_end:2, *.pair_transition:1"
)
"""Of ``[batch, s, r, c]`` and ``[batch, r, r, c]`` the dim that each module of a block keeps apart.

Source: FastFold's dynamic axial parallelism, as SuperScaler's study lists it.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """Modules whose path fits ``pattern`` are cut along one dim.

    Attributes:
        pattern: with wildcards.
        first: dim of the tensor that the module reads first.
        then: dim of all others, and of its results.
    """

    pattern: str
    first: int
    then: int

    @classmethod
    def parse(cls, word: str) -> Cut:
        """Read ``PATTERN:DIM``, or ``PATTERN:DIM>DIM`` where results have it elsewhere.

        Raises:
            PlanError: the word has another form.
        """
        pattern, _, dims = word.strip().rpartition(":")
        first, arrow, then = dims.partition(">")
        then = then if arrow else first
        if not pattern or not first.isdecimal() or not then.isdecimal():
            raise PlanError(
                f"modules: {word.strip()!r} should be PATTERN:DIM, such as '*.tri_in:2', or "
                "PATTERN:DIM>DIM if results are cut along another dim."
            )
        return cls(pattern, int(first), int(then))

    def instance(self, module: str) -> str | None:
        """The path of the module that fits and that ``module`` is, or is inside of."""
        paths = accumulate(module.split("."), lambda a, b: f"{a}.{b}")
        return next((path for path in paths if fnmatchcase(path, self.pattern)), None)


def axial_loops(graph: Graph, modules: str) -> dict[Op, str]:
    """The loop along which each op is cut; those in no module keep dim 1 apart.

    Args:
        graph: whose ops.
        modules: ``Cut`` words, with commas between.

    Raises:
        PlanError: a word is malformed, or no module fits its pattern.
    """
    cuts = [Cut.parse(word) for word in modules.split(",")]
    fits: dict[Op, tuple[str, Cut]] = {}
    for op in graph.ops:
        found = ((cut.instance(op.module), cut) for cut in cuts)
        fits[op] = next(((path, cut) for path, cut in found if path), ("", Cut("", 1, 1)))
    for cut in cuts:
        if cut not in {cut for _, cut in fits.values()}:
            raise PlanError(
                f"{graph.name} has no modules {cut.pattern!r}; the plan is for Evoformers: say "
                "modules='PATTERN:DIM,...' if they are named otherwise."
            )
    loops: dict[Op, str] = {}
    for (_, cut), ops in groupby(graph.ops, fits.__getitem__):
        loops |= followed(tuple(ops), cut.first, cut.then)
    return loops


def spread_axially(
    plan: Plan, ops: Iterable[Op], devices: Sequence[Device], num: int, modules: str
) -> None:
    """Cut ops along the batch among groups of ``num`` devices, and in a group along ``modules``.

    Args:
        plan: to fill.
        ops: some of its ops.
        devices: to use, those of a group next to each other.
        num: devices of a group; divides their number.
        modules: as of ``axial_loops``.

    Raises:
        PlanError: a loop has fewer iterations than a group has devices; as of ``axial_loops``.
    """
    loops = axial_loops(plan.graph, modules) if num > 1 else {}
    num_groups = len(devices) // num
    for op in ops:
        batch = plan.dims.ids(op, plan.dims.batch)
        loop = loops.get(op)
        if loop is not None and op.sizes[loop] < num:
            raise PlanError(
                f"{plan.graph.name} cut along {loop} of {op.name} into {num}: it has "
                f"{op.sizes[loop]}; use at most as many devices, or data parallel groups of them."
            )
        plan.op_trans(
            op, split(batch[0], num_groups) if batch and num_groups > 1 else replicate(num_groups)
        )
        parts = plan.op_trans(op, split(loop, num) if loop else replicate(num))
        plan.op_assign(parts, devices)


def axial_stages(
    plan: Plan,
    pp: int,
    dp: int,
    *,
    modules: str = EVOFORMER,
    zero1: bool = False,
    recompute: bool = False,
    block: str = BLOCK,
    sizes: str = "",
) -> None:
    """Stages of blocks on ``pp`` groups of devices, in each batch times rows or columns.

    Args:
        plan: to fill.
        pp: stages.
        dp: groups of a stage's devices among which the batch is cut; those of a group share rows
            and columns.
        modules: as of ``axial_loops``.
        zero1, recompute: as of ``dap``.
        block, sizes: as of ``blocks.stages_of_blocks``.

    Raises:
        PlanError: ``pp * dp`` does not divide the devices.
    """
    num = len(plan.devices)
    if min(pp, dp) < 1 or num % (pp * dp):
        raise PlanError(
            f"pp={pp} times dp={dp} on {num} devices: both are at least 1, and their product "
            f"{pp * dp} has to divide {num}; the rest shares rows and columns."
        )
    per_stage = num // pp
    for stage in stages_of_blocks(plan, pp, block=block, sizes=sizes):
        first = stage.index * per_stage
        devices = plan.devices[first : first + per_stage]
        spread_axially(plan, stage.ops, devices, per_stage // dp, modules)
    if zero1:
        shard_storage(plan)
    if recompute:
        plan.rerun(*blocks_of(plan.graph, block))
