"""mBART: where the time of a step goes, under 1F1B and the interlaced pipelines."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.studies import report
from bench.studies.systems import IN_STEPS, INTERLACED, MEGATRON_WORDS

SYSTEMS = (MEGATRON_WORDS.name, IN_STEPS.name, INTERLACED.name)

CLAIMS = (1.9, 1.5)
"""The paper's speed-ups of its "Interlaced-block" over Megatron-LM, and of its interlaced pipeline
over that. No public text says what the first is; the table of its public code stands for it here.
"""

PARTS = ("compute", "communication", "bubble")


def run(out: Path) -> dict[str, Any]:
    """The table, the picture, and the JSON of both, from the tuned ways of the mBART study."""
    tuned = json.loads((out / "study_mbart.json").read_text())
    rows = [
        {"gpus": row["gpus"], "model": row["model"], "system": name, "outcome": found}
        for row in tuned["rows"]
        for name in SYSTEMS
        if (found := report.best_of(row["systems"][name])) is not None
    ]
    _show(rows)
    _plot(rows, out / "study_breakdown.png")
    return {
        "study": "mBART: break-down",
        "claim": list(CLAIMS),
        "assumptions": tuned["assumptions"],
        "rows": rows,
    }


def lines_of(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table: seconds of a step by what devices do."""
    lines = [["GPUs", "model", "plan", *PARTS, "step", "best way"]]
    for row in rows:
        found = row["outcome"]
        parts = [f"{found['shares'][part] * found['secs']:.1f}" for part in PARTS]
        head = [str(row["gpus"]), row["model"], row["system"]]
        lines.append([*head, *parts, f"{found['secs']:.1f}", found["way"]])
    return lines


def ratios_text(rows: list[dict[str, Any]]) -> str:
    """How much faster each plan is than the one before, and what the paper says."""
    secs = {(row["gpus"], row["system"]): row["outcome"]["secs"] for row in rows}
    texts = []
    for (slower, faster), claim in zip(pairwise(SYSTEMS), CLAIMS, strict=True):
        ratios = [
            f"{secs[n, slower] / secs[n, faster]:.2f} x on {n}"
            for n in dict.fromkeys(count for count, _ in secs)
            if {(n, slower), (n, faster)} <= secs.keys()
        ]
        texts.append(f"{faster} over {slower}: {', '.join(ratios) or '-'}; the paper: {claim} x")
    return "\n".join(texts)


def _show(rows: list[dict[str, Any]]) -> None:
    print("mBART: seconds of a step (mean of the GPUs), simulated; the best way of each plan\n")
    print(report.grid(lines_of(rows)), "\n")
    print(ratios_text(rows))


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    base = {row["gpus"]: 0.0 for row in rows}
    for row in rows:
        base[row["gpus"]] = base[row["gpus"]] or row["outcome"]["secs"]
    bottom = [0.0] * len(rows)
    for part, colour in zip(PARTS, report.COLOURS, strict=False):
        heights = [
            r["outcome"]["shares"][part] * r["outcome"]["secs"] / base[r["gpus"]] for r in rows
        ]
        ax.bar(range(len(rows)), heights, 0.8, bottom, color=colour, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    labels = [f"{row['system']}\n{row['gpus']} GPUs" for row in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=6, rotation=30)
    ax.set(ylabel="time of a step, first of its GPUs = 1", title="mBART: where a step's time goes")
    ax.legend(frameon=False, fontsize=8, ncols=3)
    ax.set_ylim(0, max(bottom, default=1) * 1.15)
    figure.savefig(path, dpi=120)
    plt.close(figure)
