"""mBART: where the time of a step goes, under 1F1B and the interlaced pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.studies import cluster, report
from bench.studies.study import STUDIES
from bench.studies.systems import INTERLACED, MEGATRON_WORDS
from bench.studies.tuning import best, outcomes

SYSTEMS = (MEGATRON_WORDS, INTERLACED)

CLAIM = 1.9 * 1.5
"""The paper's speed-ups of its *Interlaced-block* over Megatron-LM, and of the interlaced pipeline
over that. What the first is, no public text says, so it is left out here."""

PARTS = ("compute", "communication", "bubble")


def run(out: Path, gpus: tuple[int, ...] = cluster.GPUS) -> dict[str, Any]:
    """The table, the picture, and the JSON of both."""
    rows = []
    for count in gpus:
        for label, workload in STUDIES["mbart"].workloads[count].items():
            for system in SYSTEMS:
                found = best(list(outcomes(workload, count, system)))
                rows.append(
                    {
                        "gpus": count,
                        "model": label,
                        "system": system.name,
                        "outcome": found.to_json() if found else None,
                    }
                )
    _show(rows)
    _plot(rows, out / "study_breakdown.png")
    assumptions = [*cluster.ASSUMPTIONS, *STUDIES["mbart"].assumptions]
    return {"study": "mBART: break-down", "claim": CLAIM, "assumptions": assumptions, "rows": rows}


def _show(rows: list[dict[str, Any]]) -> None:
    print("mBART: seconds of a step (mean of the GPUs), simulated; the best way of each plan\n")
    print(report.grid(lines_of(rows)), "\n")
    print(ratios_text(rows))


def lines_of(rows: list[dict[str, Any]]) -> report.Lines:
    """The seconds of every part of a step."""
    lines = [["GPUs", "model", "plan", *PARTS, "step", "best way"]]
    for row in rows:
        head, found = [str(row["gpus"]), row["model"], row["system"]], row["outcome"]
        if found is None:
            lines.append([*head, *["does not fit"] * len(PARTS), "-", "-"])
            continue
        parts = [f"{found['shares'][part] * found['secs']:.1f}" for part in PARTS]
        lines.append([*head, *parts, f"{found['secs']:.1f}", found["way"]])
    return lines


def ratios_text(rows: list[dict[str, Any]]) -> str:
    """How much faster the interlaced pipeline is, and the paper's."""
    secs = {
        (r["gpus"], r["system"]): r["outcome"]["secs"] for r in rows if r["outcome"] is not None
    }
    ratios = [
        f"{secs[n, MEGATRON_WORDS.name] / secs[n, INTERLACED.name]:.2f} x on {n}"
        for n in dict.fromkeys(count for count, _ in secs)
        if {(n, MEGATRON_WORDS.name), (n, INTERLACED.name)} <= secs.keys()
    ]
    return f"interlaced over 1F1B: {', '.join(ratios) or '-'}; the paper: {CLAIM:.2g} x"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [row for row in rows if row["outcome"] is not None]
    figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    base = {row["gpus"]: 0.0 for row in shown}
    for row in shown:
        base[row["gpus"]] = base[row["gpus"]] or row["outcome"]["secs"]
    bottom = [0.0] * len(shown)
    for part, colour in zip(PARTS, report.COLOURS, strict=False):
        heights = [
            r["outcome"]["shares"][part] * r["outcome"]["secs"] / base[r["gpus"]] for r in shown
        ]
        ax.bar(range(len(shown)), heights, 0.8, bottom, color=colour, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    labels = [f"{row['system']}\n{row['gpus']} GPUs" for row in shown]
    ax.set_xticks(range(len(shown)), labels, fontsize=6, rotation=30)
    ax.set(ylabel="time of a step, first of its GPUs = 1", title="mBART: where a step's time goes")
    ax.legend(frameon=False, fontsize=8, ncols=3)
    ax.set_ylim(0, max(bottom, default=1) * 1.15)
    figure.savefig(path, dpi=120)
    plt.close(figure)
