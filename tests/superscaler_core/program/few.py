"""Few: one plan for each mechanism of step programs."""

from __future__ import annotations

from functools import cache

import superscaler_core as ss
from tests.superscaler_core.cases import Case

ALL = ss.Overlap(prefetch=1, reductions=True, moves=True, bucket_bytes=1 << 12)
FEW = {
    "windows": Case("zero3", 2),
    "prefetched": Case("zero3", 2, overlap=ALL),
    "halves": Case("zero3", 2, overlap=ss.Overlap(duplex=True, prefetch=1, reductions=True)),
    "moves": Case("megatron", 2, overlap=ALL),
    "experts": Case("expert_parallel", 2, model="moe"),
    "stages": Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 3}),
    "routes": Case("chimera", 4, {"pp": 2, "zero": 1}),
    "split": Case("one_f_one_b", 2, {"microbatches": 3}, rewrite="late"),
    "spans": Case("coshard", 2, {"parts": 2}),
    "apart": Case("interlaced", 4, {"microbatches": 3}, model="mbart", rewrite="apart"),
    "swapped": Case("swap", 2),
    "versions": Case("pipedream", 2, {"microbatches": 4}),
    "turns": Case("nf1b", 2, {"microbatches": 2, "recycle": 1}, model="evoformer"),
    "buffers": Case("spatial", 2, model="wide_resnet"),
    "pairs": Case("dualpipe_v", 2, {"pp": 1, "tp": 2, "microbatches": 4}, sizes={"layers": 4},
     overlap=ss.Overlap(pairs=True)),
}  # fmt: skip
"""By mechanism, a case whose step program has it."""

FEWER = ("prefetched", "halves", "experts", "stages", "swapped", "turns")
"""Mechanisms of slow tests, such as those that change a program at many places."""


@cache
def compiled(mechanism: str) -> ss.Compiled:
    """A case of ``FEW``, compiled once for all tests."""
    return FEW[mechanism].compiled()
