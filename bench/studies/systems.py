"""Systems: the sPrograms that the studies compare, and the knobs that each may turn.

All are made of ``superscaler_core.plans``. A *way* is one setting of a system's knobs: how many
replicas of the model share the batch, and what the sProgram is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import superscaler_core as ss
from bench.studies import cluster
from superscaler_core.cli.sources import plan_source
from superscaler_core.parallel.knobs import numbers
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.balance import balanced_sizes
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel
from superscaler_core.schedules import nf1b, one_f_one_b

Ladder = tuple[Mapping[str, Any], ...]
"""Knobs that save memory, each more of it than the one before, in more time.

In the words of the command line, as result files have them.
"""

SAVINGS: Ladder = ({}, {"recompute": True}, {"rerun": True})
"""What blocks keep: all; what segments between communication read; their input alone."""

MAX_TP = 8
"""Tensor parallel stays inside a host, as Megatron-LM's and DeepSpeed's users keep it; it goes
beyond only where nothing else fits."""


@dataclass(frozen=True)
class Way:
    """One setting of a system.

    Attributes:
        dp: replicas that share the batch.
        knobs: of the sProgram, but for the number of microbatches and what saves memory.
        splits: into how many parts weights and gradients are cut: for a quick look at memory.
        state_splits: into how many master weights and states are; as ``splits`` if 0.
        on_host: whether weights and states are in host memory.
        ladders: of further knobs; the next is for what does not fit with the one before.
        is_last_resort: whether it is tried only if no other way fits.
    """

    dp: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    splits: int = 1
    state_splits: int = 0
    on_host: bool = False
    ladders: tuple[Ladder, ...] = (SAVINGS,)
    is_last_resort: bool = False

    def with_knobs(self, knobs: Mapping[str, Any]) -> Way:
        """The same with further knobs."""
        return replace(self, knobs={**self.knobs, **knobs})

    def __str__(self) -> str:
        """All knobs that are not at their default."""
        set_knobs = {k: v for k, v in self.knobs.items() if v is True or v not in (False, "", 1)}
        shown = {"dp": self.dp, **set_knobs}
        return " ".join(k if v is True else f"{k}={v}" for k, v in shown.items())


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
    for tp, pp in product(_powers(num_gpus), _powers(num_gpus)):
        if num_gpus % (tp * pp) == 0:
            yield tp, pp, num_gpus // (tp * pp)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def balanced(
    plan: ss.Plan, *, microbatches: int, pp: int, coshard_blocks: str = "", **knobs: Any
) -> None:
    """``hybrid`` with stages that take nearly as long."""
    sizes = balanced_sizes(plan.graph, pp, cluster.profile())
    blocks = numbers(coshard_blocks)
    plan_source("hybrid").call(
        plan, microbatches=microbatches, pp=pp, sizes=sizes, coshard_blocks=blocks, **knobs
    )


def megatron_ways(num_gpus: int, *, vocabulary: bool = False) -> Iterator[Way]:
    """Data, tensor and pipeline parallel; replicas share master weights and states (ZeRO 1)."""
    for tp, pp, dp in grids(num_gpus):
        knobs = {"tp": tp, "pp": pp, "vocabulary": vocabulary, "zero1": dp > 1}
        yield Way(dp, knobs, tp * pp, num_gpus, is_last_resort=tp > MAX_TP)


MEGATRON = System("Megatron 1F1B", balanced, megatron_ways)
MEGATRON_WORDS = System("Megatron 1F1B", balanced, lambda num: megatron_ways(num, vocabulary=True))
"""The same with words cut among tensor parallel devices, for models that have many."""


# --- DeepSpeed ----------------------------------------------------------------------------------


def zero3(
    plan: ss.Plan,
    *,
    microbatches: int,
    tp: int = 1,
    recompute: bool = False,
    rerun: bool = False,
    offload: bool = False,
    vocabulary: bool = False,
) -> None:
    """ZeRO 3 over the data parallel devices of a tensor parallel grid; its storage on the host."""
    tensor_parallel(plan, plan.graph.ops, plan.devices, tp, vocabulary=vocabulary)
    plan.op_order(one_f_one_b(1, microbatches))
    shard_storage(plan)
    plan.gather_weights(*plan.blocks.groups)
    if offload:
        plan.store_on_host()
    if recompute:
        plan.keep(Keep.SEGMENT_INPUTS)
    if rerun:
        plan.keep(Keep.BLOCK_INPUTS)


def zero3_ways(num_gpus: int, *, vocabulary: bool = False) -> Iterator[Way]:
    """ZeRO 3 with tensor parallel inside, and offloading."""
    for tp, offload in product(_powers(num_gpus), (False, True)):
        knobs = {"tp": tp, "offload": offload, "vocabulary": vocabulary}
        yield Way(num_gpus // tp, knobs, num_gpus, on_host=offload, is_last_resort=tp > MAX_TP)


DEEPSPEED = System("DeepSpeed ZeRO-3", zero3, zero3_ways)
DEEPSPEED_WORDS = System("DeepSpeed ZeRO-3", zero3, lambda num: zero3_ways(num, vocabulary=True))
"""The same with words cut among tensor parallel devices: gathered whole they alone fill a GPU."""


# --- ours ---------------------------------------------------------------------------------------

PARTS = (2, 4, 8)

COSHARD_SAVINGS: dict[bool, Ladder] = {
    True: ({}, {"rerun": True}),
    False: ({}, {"recompute": True}, {"rerun": True, "rerun_coshard": False}, {"rerun": True}),
}
"""What blocks keep, by whether all of them are in parts: those keep the inputs of attention and MLP
as it is, or their own alone. More parts are tried before blocks keep less."""


def coshard_ways(
    num_gpus: int, blocks: Sequence[str] = ("",), *, vocabulary: bool = False
) -> Iterator[Way]:
    """Megatron's ways, with attention and MLP of some blocks in parts on one device."""
    ways = megatron_ways(num_gpus, vocabulary=vocabulary)
    for way, chosen in product(ways, blocks):
        ladders = tuple(
            tuple({"coshard": parts, **saving} for parts in PARTS)
            for saving in COSHARD_SAVINGS[not chosen]
        )
        yield replace(way, knobs={**way.knobs, "coshard_blocks": chosen}, ladders=ladders)


def coshard(*blocks: str, vocabulary: bool = False) -> System:
    """Co-shard inside Megatron's grids; ``blocks`` are the choices of where, all if none."""
    chosen = blocks or ("",)
    ways = partial(coshard_ways, blocks=chosen, vocabulary=vocabulary)
    return System("co-shard", balanced, ways)


def interlaced_ways(num_gpus: int, slack: int) -> Iterator[Way]:
    """Embeddings on all devices, layers in stages of tensor parallel groups."""
    for tp in _powers(num_gpus // 2):
        yield Way(1, {"tp": tp, "slack": slack}, num_gpus, is_last_resort=tp > MAX_TP)


IN_STEPS = System(
    "interlaced in steps", plan_source("interlaced").call, lambda num: interlaced_ways(num, 0)
)
"""The table of the paper's public code: all devices meet at every step's border."""

INTERLACED = System(
    "interlaced", plan_source("interlaced").call, lambda num: interlaced_ways(num, 1)
)
"""Look-ups a step ahead, their gradients a step behind."""


# --- AlphaFold ----------------------------------------------------------------------------------

AXIAL_SAVINGS: Ladder = ({}, {"recompute": True})
"""What blocks keep under DAP: all, or their input."""

RECYCLE = 2
"""Turns without gradient in front of the one that is trained: 3F1B."""


def dap(plan: ss.Plan, *, microbatches: int, zero3: bool = False, **knobs: Any) -> None:
    """DAP with data parallel, microbatches one after another with all their turns."""
    plan_source("dap").call(plan, **knobs)
    plan.op_order(nf1b(1, microbatches, RECYCLE))
    if zero3:
        shard_storage(plan)
        plan.gather_weights(*plan.blocks.groups)


def dap_ways(num_gpus: int) -> Iterator[Way]:
    """Splits of the devices between axial and data parallel; all share states (ZeRO 1)."""
    for axial in _powers(min(num_gpus, MAX_TP)):
        dp = num_gpus // axial
        yield Way(dp, {"dp": dp, "zero1": True}, 1, num_gpus, ladders=(AXIAL_SAVINGS,))


def dap_zero3_ways(num_gpus: int) -> Iterator[Way]:
    """The same with ZeRO 3."""
    for way in dap_ways(num_gpus):
        yield replace(way, knobs={"dp": way.dp, "zero3": True}, splits=num_gpus)


DAP = System("DAP+DP", dap, dap_ways)
DAP_ZERO3 = System("DeepSpeed ZeRO-3", dap, dap_zero3_ways)


def nf1b_ways(num_gpus: int) -> Iterator[Way]:
    """Pipelines with turns; a stage's devices are axial or data parallel, and share states.

    Of two stages and more: one stage is DAP with data parallel.
    """
    for pp in _powers(num_gpus)[1:]:
        left = num_gpus // pp
        for dp in _powers(left):
            if left // dp <= MAX_TP:
                knobs = {"pp": pp, "dp": dp, "recycle": RECYCLE, "zero1": left > 1}
                yield Way(dp, knobs, pp, num_gpus, ladders=(AXIAL_SAVINGS,))


NF1B = System("3F1B", plan_source("nf1b").call, nf1b_ways)
