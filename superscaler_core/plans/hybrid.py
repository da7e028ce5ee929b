"""Hybrid: data, tensor and pipeline parallel at once, with options that save memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superscaler_core.checks import one_of
from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.coshard import coshard as add_coshard
from superscaler_core.plans.pieces.grid_stages import grid_stages
from superscaler_core.plans.pieces.inner_runs import ChosenBlocks, chosen_blocks
from superscaler_core.schedules import SCHEDULES, Generator, generate, interleaved


def hybrid(
    plan: Plan,
    *,
    tp: int = 1,
    pp: int = 1,
    microbatches: int = 8,
    chunks: int = 1,
    schedule: Generator | str = interleaved,
    halves: bool = False,
    apart: bool = False,
    sequence: bool = False,
    vocabulary: bool = False,
    experts: bool | int = False,
    keep: Keep = Keep.EVERYTHING,
    coshard: int = 1,
    coshard_blocks: ChosenBlocks = None,
    keep_coshard: Keep | None = None,
    sizes: Sequence[int] = (),
) -> None:
    """Stages of blocks on ``pp`` groups of devices, each a grid of batch times inner features.

    Tensor parallel devices have consecutive numbers, and groups are the outermost axis.
    Communication and memory are those of the combined plans.

    Args:
        plan: to fill.
        tp: devices that share a stage's inner features, as in ``megatron``.
        pp: groups of devices, the schedule's workers; inside a group the batch is cut among
            ``len(devices) / (tp * pp)`` replicas.
        microbatches: number per step, each as large as the captured batch.
        chunks: stages per group of devices, for the schedules ``interleaved`` and ``looped-bfs``.
        schedule: a value or a name of ``SCHEDULES``; ``interleaved`` is 1F1B if there is one chunk.
        halves: run every backward as an I, for which earlier stages wait, and a W.
        apart: run every recomputation as an action of its own, maybe before the gradient arrives.
        sequence: cut the ops between tensor-parallel maps along the sequence.
        vocabulary: as in ``megatron``.
        experts: deal experts out to the replicas of a stage, instead of cutting their batch; a
            number, to so many neighbouring devices, groups of which are data parallel.
        keep: which values of the blocks are kept for the backward.
        coshard: parts of every attention and MLP that a device runs one after another, as in
            ``coshard``, which keeps the input of each attention and MLP.
        coshard_blocks: the blocks with such parts, as in ``coshard``.
        keep_coshard: what those blocks keep besides; as ``keep`` if None. With ``BLOCK_INPUTS``
            they keep only their input, and compute attention three times instead of twice.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Raises:
        PlanError: ``tp * pp`` does not divide the devices.
        ScheduleError: the schedule does not take these counts.
    """
    if isinstance(schedule, str):
        schedule = SCHEDULES[one_of("schedule", schedule, SCHEDULES)]
    order = generate(schedule, pp, microbatches, chunks=chunks, halves=halves, apart=apart)
    splits: dict[str, Any] = {"sequence": sequence, "vocabulary": vocabulary, "experts": experts}
    grid_stages(plan, order, tp, sizes=sizes, **splits)
    # After all decisions that need whole parts, such as storage.
    add_coshard(plan, parts=coshard, blocks=coshard_blocks)
    if coshard == 1 or keep_coshard is None:
        plan.keep(keep)
        return
    cut = chosen_blocks(plan, coshard_blocks)
    plan.keep(keep, [ops for ops in plan.blocks.layers if ops not in cut])
    plan.keep(keep_coshard, cut)
