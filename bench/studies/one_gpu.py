"""GPT-3 1.3 B on one GPU: memory by length of the sequence, and how long it can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import superscaler_core as ss
from bench.studies import cluster, report
from bench.studies.processes import side_by_side
from bench.studies.systems import Way, zero3
from bench.studies.workload import Workload, compiled
from superscaler_core.cli.sources import plan_source

SEQUENCES = (2048, 4096, 8192, 12288, 16384, 24576)
"""Lengths of the table; the paper's code scripts co-shard up to the last."""

GRAIN = 512
"""Tokens to which the longest sequence is found."""


@dataclass(frozen=True)
class Method:
    """A way to save memory."""

    name: str
    sprogram: Callable[..., None]
    way: Way


METHODS = (
    Method("as it is", plan_source("hybrid").call, Way(1)),
    Method("recompute", plan_source("hybrid").call, Way(1, {"rerun": True})),
    Method("ZeRO-3-offload", zero3, Way(1, {"rerun": True, "offload": True})),
    Method("co-shard", plan_source("hybrid").call, Way(1, {"coshard": 8})),
    Method("co-shard, whole", plan_source("hybrid").call, Way(1, {"coshard": 8, "rerun": True})),
)

CLAIM = {"ZeRO-3-offload": 1.2, "recompute": 1.7}
"""The paper: co-shard's longest sequence over theirs."""


def workload(sequence: int) -> Workload:
    """GPT-3 with 1.3 B parameters, one sequence a step."""
    sizes = {
        "layers": 24, "width": 2048, "heads": 32, "vocabulary": 51200, "sequence": sequence,
        "fused": False,
    }  # fmt: skip
    return Workload("gpt", sizes, "float16", 1)


def program(method: Method, sequence: int) -> ss.Compiled:
    """On one GPU."""
    return compiled(workload(sequence), 1, method.sprogram, method.way, 1)


def peak_bytes(method: Method, sequence: int) -> int:
    """Of the GPU."""
    (memory,) = program(method, sequence).memory.values()
    return memory.total_bytes


def longest(method: Method) -> int:
    """The longest sequence that fits, by bisection; 0 if the shortest of a grain does not."""
    least, most = 0, 1
    while peak_bytes(method, most * GRAIN) <= cluster.limit_bytes():
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        fits = peak_bytes(method, middle * GRAIN) <= cluster.limit_bytes()
        least, most = (middle, most) if fits else (least, middle)
    return least * GRAIN


def run(out: Path, num_processes: int) -> dict[str, Any]:
    """The table, the picture, and the JSON of both."""
    rows = side_by_side(_row, [method.name for method in METHODS], num_processes, "memory")
    _show(rows)
    _plot(rows, out / "study_memory.png")
    return {
        "study": "GPT-3 1.3 B on one GPU",
        "claim": CLAIM,
        "assumptions": [
            *cluster.ASSUMPTIONS,
            "One sequence a step, float16 with float32 master weights, gradients and Adam states; "
            "attention keeps its matrix.",
            "ZeRO-3-offload keeps weights, gradients and states on the host and recomputes blocks; "
            "co-shard has 8 parts, and keeps what enters each attention and MLP; where blocks are "
            "whole it keeps what enters a block, and computes attention three times.",
        ],
        "rows": rows,
    }


def _row(name: str) -> dict[str, Any]:
    """All of one method."""
    (method,) = (method for method in METHODS if method.name == name)
    return {
        "method": method.name,
        "longest": longest(method),
        "gib": {str(s): peak_bytes(method, s) / 2**30 for s in SEQUENCES},
        "secs": {
            str(s): ss.simulate(program(method, s), cluster.profile()).secs for s in SEQUENCES
        },
    }


def _show(rows: list[dict[str, Any]]) -> None:
    limit = cluster.limit_bytes() / 2**30
    print(f"GPT-3 1.3 B on one V100: GiB by tokens of the sequence ({limit:.0f} are there)\n")
    print(report.grid(memory_lines(rows)), "\n")
    print("seconds of a step, simulated, whether it fits or not\n")
    print(report.grid(time_lines(rows)), "\n")
    print("\n".join(ratio_texts(rows)))


def memory_lines(rows: list[dict[str, Any]]) -> report.Lines:
    """GiB by tokens, and the longest sequence."""
    return [["method", *rows[0]["gib"], "longest"]] + [
        [row["method"], *(f"{gib:.1f}" for gib in row["gib"].values()), str(row["longest"])]
        for row in rows
    ]


def time_lines(rows: list[dict[str, Any]]) -> report.Lines:
    """Seconds of a step by tokens."""
    return [["method", *rows[0]["secs"]]] + [
        [row["method"], *(f"{secs:.3g}" for secs in row["secs"].values())] for row in rows
    ]


def ratio_texts(rows: list[dict[str, Any]]) -> list[str]:
    """How much longer co-shard's sequences are, and the paper's."""
    by_name = {row["method"]: row["longest"] for row in rows}
    texts = []
    for name, claim in CLAIM.items():
        ratio = by_name["co-shard"] / by_name[name] if by_name[name] else float("inf")
        texts.append(
            f"co-shard's longest sequence is {ratio:.2f} x that of {name}; the paper: {claim} x"
        )
    return texts


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row, colour in zip(rows, report.COLOURS, strict=False):
        label = f"{row['method']} (up to {row['longest']})"
        tokens = [int(key) for key in row["gib"]]
        ax.plot(tokens, list(row["gib"].values()), "o-", color=colour, label=label, ms=4)
    ax.axhline(cluster.limit_bytes() / 2**30, color="grey", ls="--", lw=0.8)
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
