"""MeshCut: stages on submeshes with the split of every op, as a value that fills a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device, Keep, OpSplit, Placement, Plan
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.schedules import nf1b, one_f_one_b
from superscaler_core.space.choices import MeshSizes


@dataclass(frozen=True)
class MeshStage:
    """One stage: blocks that run together on a mesh of devices.

    Attributes:
        blocks: the first block, and the one after the last.
        devices: the devices of the mesh; its last axis varies fastest.
        mesh: sizes of its axes.
        keep: what the blocks keep for the backward: everything, or block inputs.
        splits: the name and the split of each op, with the first devices of the cluster in place of
            ``devices``.
    """

    blocks: tuple[int, int]
    devices: tuple[Device, ...]
    mesh: MeshSizes
    keep: Keep
    splits: tuple[tuple[str, OpSplit], ...] = field(repr=False)

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        first, end = self.blocks
        keep = "" if self.keep is Keep.EVERYTHING else f" keeping {self.keep}"
        return f"{first}-{end - 1} on {self.devices[0]}-{self.devices[-1]} as {mesh}{keep}"


@dataclass(frozen=True)
class MeshCut:
    """An sProgram: the stages of a model in the order of 1F1B, or of nF1B if the model is recycled.

    Devices that read the same weights each store a piece of them with its optimizer states, as Alpa
    does if it prefers reduce-scatter.

    Attributes:
        stages: in order.
        microbatches: microbatches in a step.
        objective: the value that the planner minimized, in seconds.
        recycle: recycling passes of every microbatch.
    """

    stages: tuple[MeshStage, ...]
    microbatches: int
    objective: float
    recycle: int = 0

    def __str__(self) -> str:
        return "; ".join(map(str, self.stages))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Blocks of every stage."""
        return tuple(end - first for first, end in (stage.blocks for stage in self.stages))

    def __call__(self, plan: Plan, microbatches: int = 0, sizes: Sequence[int] = ()) -> None:
        """Fill a plan.

        Args:
            plan: to fill.
            microbatches: microbatches of a shorter step, if given.
            sizes: blocks of every stage of a model with fewer blocks, if given.

        Raises:
            PlanError: the plan is of another model.
        """
        num_stages, counts = len(self.stages), tuple(sizes) or self.sizes
        stages = stages_of_blocks(plan, num_stages, counts)
        for mine, stage in zip(self.stages, stages, strict=True):
            splits = dict(mine.splits)
            for op in stage.ops:
                if op.name not in splits:
                    raise PlanError(f"stage {mine}: it has no split for op {op.name}.")
                plan.split_as(op, splits[op.name].on(mine.devices))
        num, turns = microbatches or self.microbatches, self.recycle
        order = nf1b(num_stages, num, turns) if turns else one_f_one_b(num_stages, num)
        plan.op_order(order, Placement(tuple(stage.devices for stage in self.stages)))
        shard_storage(plan)
        ends = pairwise(accumulate(counts, initial=0))
        for each, (first, end) in zip(self.stages, ends, strict=True):
            if each.keep is not Keep.EVERYTHING:
                plan.keep(each.keep, plan.blocks.layers[first:end])
