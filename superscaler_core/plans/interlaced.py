"""Interlaced pipeline: embeddings cut among all devices, layers in stages of some of them."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Axis, Plan, Stage
from superscaler_core.plans import cuts
from superscaler_core.plans.blocks import BLOCK, block_starts, blocks_of
from superscaler_core.plans.tensor_parallel import tensor_parallel
from superscaler_core.schedules import interlaced as order


def interlaced(
    plan: Plan,
    *,
    tp: int = 1,
    microbatches: int = 8,
    slack: int = 0,
    rows: bool = False,
    vocabulary: bool = False,
    recompute: bool = False,
    rerun: bool = False,
    block: str = BLOCK,
    embedding: str = "embed.weight",
    features: str = "",
) -> None:
    """Look words up on all devices, and run the blocks in a stage on each ``tp`` of them.

    Every look-up, an encoder's and a decoder's, is a stage of all devices, in front of as many
    stages of blocks. A microbatch gathers what is looked up on the group behind it, ``tp`` times
    the hidden state in all, and scatters its gradient, once the hidden state. Else it communicates
    as under ``megatron`` and ``one_f_one_b``; an encoder's result goes to all stages of a decoder.
    Memory a device: 1/N of the embedding; of the blocks as under ``one_f_one_b``.

    Args:
        plan: to fill.
        tp: devices of a group, which share inner features as under ``megatron``.
        microbatches: of a step, each as large as what was captured.
        slack: steps by which look-ups run ahead of the blocks, and behind them on the way back; 0
            is the table of the paper's code, where all devices meet at every step's border.
        rows: cut the embedding by rows, one a word, not by columns. Then every device has a summand
            of all that is looked up and needs all of its gradient: about N times the hidden state
            each way.
        vocabulary: cut a head along the words, among a group, as ``megatron`` does.
        recompute, rerun: as of ``hybrid``.
        block: pattern of the blocks' module paths.
        embedding: the parameter in which words are looked up.
        features: as of ``megatron``.

    Raises:
        PlanError: the groups of ``tp`` devices are no multiple of the look-ups, or a look-up has
            fewer blocks behind it than groups.

    Source: algorithm 2 of SuperScaler (Lin et al., 2023).
    """
    num = len(plan.devices)
    lookups = _lookups(plan, embedding, block)
    if tp < 1 or num % (tp * len(lookups)):
        raise PlanError(
            f"interlaced of tp={tp} on {num} devices: tp is at least 1, and behind each of "
            f"{len(lookups)} look-ups in {embedding!r} are as many groups of tp devices, so the "
            f"devices have to be a multiple of {len(lookups)} * tp."
        )
    per_lookup = num // tp // len(lookups)
    along = plan.dims.of(embedding, 0 if rows else 1)
    groups = iter(range(0, num, tp))
    for stage in _stages(plan, lookups, per_lookup, block):
        if stage.index % (per_lookup + 1) == 0:
            cuts.spread_all(plan, [Axis(num, (along,))], stage.ops, plan.devices)
        else:
            first = next(groups)
            devices = plan.devices[first : first + tp]
            tensor_parallel(plan, stage.ops, devices, tp, vocabulary=vocabulary, features=features)
    plan.op_order(order(num // tp, microbatches, len(lookups), slack))
    inside = [set(ops).difference(lookups) for ops in blocks_of(plan.graph, block)]
    if recompute:
        plan.recompute(*inside)
    if rerun:
        plan.rerun(*inside)


def _lookups(plan: Plan, embedding: str, block: str) -> list[Op]:
    """Ops that read the embedding, each in front of some blocks; a head is behind all."""
    last = block_starts(plan.graph, block)[-1].index
    readers = plan.graph.readers.get(plan.graph.parameter(embedding), ())
    found = [op for op, _ in readers if op.index < last]
    if not found:
        raise PlanError(
            f"{plan.graph.name} has no op before its last block that reads {embedding!r}; say "
            "embedding='NAME', the parameter in which words are looked up."
        )
    return found


def _stages(plan: Plan, lookups: list[Op], per_lookup: int, block: str) -> tuple[Stage, ...]:
    """Every look-up is a stage, and the blocks behind it make ``per_lookup`` stages."""
    starts = [op.index for op in block_starts(plan.graph, block)]
    ends = [*(op.index for op in lookups[1:]), len(plan.graph.ops)]
    points: list[int] = []
    for lookup, end in zip(lookups, ends, strict=True):
        inside = [index for index in starts if lookup.index < index < end]
        if len(inside) < per_lookup:
            raise PlanError(
                f"{per_lookup} stages of the {len(inside)} blocks {block!r} behind {lookup.name}: "
                "a stage has a block at least; use fewer devices, a larger tp, or more blocks."
            )
        rest = [inside[len(inside) * i // per_lookup] for i in range(1, per_lookup)]
        points += [lookup.index, lookup.index + 1, *rest]
    # What is before the first look-up is in its stage.
    return plan.pipeline(points[1:])
