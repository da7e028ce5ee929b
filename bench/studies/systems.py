"""Systems: the sPrograms that the studies compare, and the knobs that each may turn.

All are made of ``superscaler_core.plans``. A *way* is one setting of a system's knobs: how many
replicas of the model share the batch, and what the sProgram is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import superscaler_core as ss
from superscaler_core.plans import PLANS
from superscaler_core.plans.blocks import block_groups, blocks_of
from superscaler_core.plans.storage import shard_storage
from superscaler_core.plans.tensor_parallel import tensor_parallel
from superscaler_core.schedules import nf1b, one_f_one_b

MAX_TP = 8
"""Tensor parallel stays inside a host, as Megatron-LM's and DeepSpeed's users keep it."""


@dataclass(frozen=True)
class Way:
    """One setting of a system.

    Attributes:
        dp: replicas that share the batch.
        knobs: of the sProgram, but for the number of microbatches.
        splits: into how many parts weights and states are cut: for a quick look at memory.
        on_host: whether weights and states are in host memory.
    """

    dp: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    splits: int = 1
    on_host: bool = False

    def __str__(self) -> str:
        words = [f"dp={self.dp}"] + [
            name if value is True else f"{name}={value}"
            for name, value in self.knobs.items()
            if value not in (False, "", 1)
        ]
        return " ".join(words)


@dataclass(frozen=True)
class System:
    """What plans, and how it may be tuned.

    Attributes:
        name: for tables.
        sprogram: fills a plan; ``microbatches`` and the knobs of a way are passed by keyword.
        ways: from the number of GPUs to all settings.
    """

    name: str
    sprogram: Callable[..., None]
    ways: Callable[[int], Iterator[Way]]


# --- Megatron -----------------------------------------------------------------------------------


def grids(num_gpus: int) -> Iterator[tuple[int, int, int]]:
    """All (tp, pp, dp) whose product is the number of GPUs."""
    for tp, pp in product(_powers(min(num_gpus, MAX_TP)), _powers(num_gpus)):
        if num_gpus % (tp * pp) == 0:
            yield tp, pp, num_gpus // (tp * pp)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def megatron_ways(num_gpus: int, *, vocabulary: bool = False) -> Iterator[Way]:
    """Data, tensor and pipeline parallel, with and without recomputation."""
    for (tp, pp, dp), recompute in product(grids(num_gpus), (False, True)):
        knobs = {"tp": tp, "pp": pp, "recompute": recompute, "vocabulary": vocabulary}
        yield Way(dp, knobs, tp * pp)


MEGATRON = System("Megatron 1F1B", PLANS["hybrid"], megatron_ways)
MEGATRON_WORDS = System(
    "Megatron 1F1B", PLANS["hybrid"], lambda num: megatron_ways(num, vocabulary=True)
)
"""The same with words cut among tensor parallel devices, for models that have many."""


# --- DeepSpeed ----------------------------------------------------------------------------------


def zero3(
    plan: ss.Plan, *, microbatches: int, tp: int = 1, recompute: bool = False, offload: bool = False
) -> None:
    """ZeRO 3 over the data parallel devices of a tensor parallel grid; its storage on the host."""
    tensor_parallel(plan, plan.graph.ops, plan.devices, tp)
    _accumulate(plan, microbatches)
    shard_storage(plan)
    plan.gather_weights(*block_groups(plan.graph))
    if offload:
        plan.store_on_host()
    if recompute:
        plan.recompute(*blocks_of(plan.graph))


def _accumulate(plan: ss.Plan, microbatches: int) -> None:
    """One stage; microbatches one after another."""
    plan.op_order(one_f_one_b(1, microbatches))


def zero3_ways(num_gpus: int) -> Iterator[Way]:
    """ZeRO 3 with tensor parallel inside, recomputation and offloading."""
    for tp, recompute, offload in product(_powers(min(num_gpus, MAX_TP)), (False, True), (0, 1)):
        knobs = {"tp": tp, "recompute": recompute, "offload": bool(offload)}
        yield Way(num_gpus // tp, knobs, num_gpus, bool(offload))


DEEPSPEED = System("DeepSpeed ZeRO-3", zero3, zero3_ways)


# --- ours ---------------------------------------------------------------------------------------

PARTS = (2, 4, 8)


def coshard_ways(num_gpus: int, blocks: tuple[str, ...] = ("",)) -> Iterator[Way]:
    """Megatron's grids, and attention and MLP of some blocks in parts on one device."""
    for (tp, pp, dp), parts, chosen in product(grids(num_gpus), PARTS, blocks):
        yield Way(dp, {"tp": tp, "pp": pp, "coshard": parts, "coshard_blocks": chosen}, tp * pp)


def coshard(*blocks: str) -> System:
    """Co-shard inside Megatron's grids; ``blocks`` are the choices of where, all if none."""
    return System("co-shard", PLANS["hybrid"], lambda n: coshard_ways(n, blocks or ("",)))


def interlaced_ways(num_gpus: int) -> Iterator[Way]:
    """Embeddings on all devices, layers in stages of tensor parallel groups."""
    for tp, recompute in product(_powers(min(num_gpus // 2, MAX_TP)), (False, True)):
        if num_gpus // tp % 2 == 0:
            yield Way(1, {"tp": tp, "recompute": recompute}, num_gpus)


INTERLACED = System("interlaced", PLANS["interlaced"], interlaced_ways)


# --- AlphaFold ----------------------------------------------------------------------------------

RECYCLE = 2
"""Turns without gradient in front of the one that is trained: 3F1B."""


def dap(
    plan: ss.Plan, *, microbatches: int, dp: int = 1, recompute: bool = False, zero: bool = False
) -> None:
    """DAP with data parallel, microbatches one after another with all their turns."""
    PLANS["dap"](plan, dp=dp, recompute=recompute)
    plan.op_order(nf1b(1, microbatches, RECYCLE))
    if zero:
        shard_storage(plan)
        plan.gather_weights(*block_groups(plan.graph))


def dap_ways(num_gpus: int) -> Iterator[Way]:
    """Splits of the devices between axial and data parallel."""
    for axial, recompute in product(_powers(min(num_gpus, MAX_TP)), (False, True)):
        dp = num_gpus // axial
        yield Way(dp, {"dp": dp, "recompute": recompute}, 1)


def dap_zero3_ways(num_gpus: int) -> Iterator[Way]:
    """The same with ZeRO 3."""
    for way in dap_ways(num_gpus):
        yield Way(way.dp, {**way.knobs, "zero": True}, num_gpus)


DAP = System("DAP+DP", dap, dap_ways)
DAP_ZERO3 = System("DeepSpeed ZeRO-3", dap, dap_zero3_ways)


def nf1b_ways(num_gpus: int) -> Iterator[Way]:
    """Pipelines with turns, the rest of the devices axial or data parallel."""
    for pp, recompute in product(_powers(num_gpus), (False, True)):
        left = num_gpus // pp
        for dp in _powers(left):
            if left // dp <= MAX_TP:
                knobs = {"pp": pp, "dp": dp, "recompute": recompute, "recycle": RECYCLE}
                yield Way(dp, knobs, pp)


NF1B = System("3F1B", PLANS["nf1b"], nf1b_ways)
