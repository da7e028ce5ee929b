"""GPT-3 1.3 B on one GPU: memory by sequence length, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import superscaler_core as ss
from bench.cells.cell import Cell
from bench.cells.cluster import PAPER
from bench.cells.workload import Workload
from bench.studies import report
from bench.tables import Lines
from superscaler_core.evaluation import Candidate, compiled
from superscaler_core.plan import Keep
from superscaler_core.planners import Filling
from superscaler_core.planners.auto import Setting
from superscaler_core.simulator import simulate

SEQUENCES = (2048, 4096, 8192, 12288, 16384, 24576)
"""Sequence lengths of the table; the scripts of the paper's code use co-shard up to the last."""

GRAIN = 512
"""Resolution of the longest sequence, in tokens."""

METHODS: Mapping[str, Setting] = {
    "as it is": Setting(),
    "recompute": Setting(keep=Keep.BLOCK_INPUTS),
    "ZeRO-3-offload": Setting(zero=3, offload=True, keep=Keep.BLOCK_INPUTS),
    "co-shard": Setting(coshard=8),
    "co-shard, whole": Setting(coshard=8, keep=Keep.BLOCK_INPUTS),
}
"""Methods to save memory, as settings of ``auto``."""

CLAIM = {"ZeRO-3-offload": 1.2, "recompute": 1.7}
"""The paper's ratios: the longest sequence of co-shard over that of each method."""

NOTES = (
    "One sequence a step, float16 with float32 master weights, gradients and Adam states; "
    "attention keeps its matrix.",
    "ZeRO-3-offload keeps weights, gradients and states on the host and recomputes blocks; "
    "co-shard has 8 parts, and keeps what enters each attention and MLP; where blocks are "
    "whole it keeps what enters a block, and computes attention three times.",
)


@cache
def program(method: str, sequence: int) -> ss.Compiled:
    """The program of GPT-3 with 1.3 B parameters on one GPU, with one sequence per step."""
    sizes = {
        "layers": 24, "width": 2048, "heads": 32, "vocabulary": 51200, "sequence": sequence,
        "fused": False,
    }  # fmt: skip
    request = Cell("memory", Workload("gpt", sizes, "float16", 1), 1, {}).request()
    filling = Filling(METHODS[method], request.profile, 0, 1)
    return compiled(request, Candidate("", 1, filling))


def peak_bytes(method: str, sequence: int) -> int:
    """Peak memory of the GPU."""
    (memory,) = program(method, sequence).memory.values()
    return memory.total_bytes


def longest(method: str) -> int:
    """The longest sequence that fits, by bisection; 0 if a sequence of ``GRAIN`` does not fit."""
    least, most = 0, 1
    while peak_bytes(method, most * GRAIN) <= PAPER.limit_bytes:
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        fits = peak_bytes(method, middle * GRAIN) <= PAPER.limit_bytes
        least, most = (middle, most) if fits else (least, middle)
    return least * GRAIN


def compute(cell: str, method: str, budget_secs: float) -> dict[str, Any]:
    """Compute the row of one method; ``cell`` and ``budget_secs`` are not used."""
    return {
        "method": method,
        "longest": longest(method),
        "gib": {str(s): peak_bytes(method, s) / 2**30 for s in SEQUENCES},
        "secs": {str(s): simulate(program(method, s), PAPER.profile).secs for s in SEQUENCES},
    }


Rows = Sequence[Mapping[str, Any]]


def memory_lines(rows: Rows) -> Lines:
    """GiB by sequence length, and the longest sequence that fits."""
    return [["method", *rows[0]["gib"], "longest"]] + [
        [row["method"], *(f"{gib:.1f}" for gib in row["gib"].values()), str(row["longest"])]
        for row in rows
    ]


def time_lines(rows: Rows) -> Lines:
    """Seconds of a step by sequence length."""
    return [["method", *rows[0]["secs"]]] + [
        [row["method"], *(f"{secs:.3g}" for secs in row["secs"].values())] for row in rows
    ]


def ratio_texts(rows: Rows) -> list[str]:
    """Ratios of co-shard's longest sequence to those of other methods, with the paper's ratios."""
    by_name = {row["method"]: row["longest"] for row in rows}
    texts = []
    for name, claim in CLAIM.items():
        ratio = by_name["co-shard"] / by_name[name] if by_name[name] else float("inf")
        texts.append(
            f"co-shard's longest sequence is {ratio:.2f} x that of {name}; the paper: {claim} x"
        )
    return texts


def draw(rows: Rows, path: Path) -> None:
    """Draw memory by sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row, colour in zip(rows, report.COLOURS, strict=False):
        label = f"{row['method']} (up to {row['longest']})"
        tokens = [int(key) for key in row["gib"]]
        ax.plot(tokens, list(row["gib"].values()), "o-", color=colour, label=label, ms=4)
    ax.axhline(PAPER.limit_bytes / 2**30, color="grey", ls="--", lw=0.8)
    ax.set(
        xlabel="tokens of the sequence", ylabel="GiB of the GPU, simulated", yscale="log",
        title="GPT-3 1.3 B on one V100",
    )  # fmt: skip
    ax.set_xticks(SEQUENCES, map(str, SEQUENCES), fontsize=7)
    ax.set_yticks((16, 32, 64, 128, 256), ("16", "32", "64", "128", "256"))
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
