"""The table of plans: every sProgram by its name."""

from __future__ import annotations

from collections.abc import Callable

from superscaler_core.plans.accumulate import accumulate
from superscaler_core.plans.coshard import coshard
from superscaler_core.plans.data_parallel import data_parallel
from superscaler_core.plans.expert_parallel import expert_parallel
from superscaler_core.plans.hybrid import hybrid
from superscaler_core.plans.interlaced import interlaced
from superscaler_core.plans.megatron import megatron
from superscaler_core.plans.megatron_sp import megatron_sp
from superscaler_core.plans.nf1b import nf1b
from superscaler_core.plans.pipeline import PIPELINES
from superscaler_core.plans.recompute import recompute
from superscaler_core.plans.sequence_parallel import sequence_parallel
from superscaler_core.plans.spatial import spatial
from superscaler_core.plans.swap import swap
from superscaler_core.plans.zero1 import zero1
from superscaler_core.plans.zero2 import zero2
from superscaler_core.plans.zero3 import zero3
from superscaler_core.plans.zero3_offload import zero3_offload
from superscaler_core.plans.zero_offload import zero_offload
from superscaler_core.table import Table

PLANS: Table[Callable[..., None]] = Table(
    "plans",
    {
        "data_parallel": data_parallel,
        "accumulate": accumulate,
        "megatron": megatron,
        "sequence_parallel": sequence_parallel,
        "megatron_sp": megatron_sp,
        "expert_parallel": expert_parallel,
        "zero1": zero1,
        "zero2": zero2,
        "zero3": zero3,
        "recompute": recompute,
        **PIPELINES,
        "interlaced": interlaced,
        "hybrid": hybrid,
        "nf1b": nf1b,
        "coshard": coshard,
        "zero_offload": zero_offload,
        "zero3_offload": zero3_offload,
        "swap": swap,
        "spatial": spatial,
    },
)
"""All sPrograms by name; ``published`` and other installed packages bring further ones."""
