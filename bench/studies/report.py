"""Tables and pictures of studies, from their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""A GPU count and a model: ``gpus``, ``model``, ``systems``: by name all outcomes."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
WIDTH = 100


def best_of(found: Iterable[Row]) -> Row | None:
    """The fastest outcome that fits, of those that were simulated in full."""
    fitting = [o for o in found if not o["problem"] and not o["is_estimate"]]
    return max(fitting, key=lambda outcome: outcome["samples_per_sec"], default=None)


def speed_up(row: Row, ours: Sequence[str]) -> float | None:
    """The best of ours over the best of the others; None if none of either fits."""
    best = {name: best_of(found) for name, found in row["systems"].items()}
    mine = [o["samples_per_sec"] for name, o in best.items() if o and name in ours]
    others = [o["samples_per_sec"] for name, o in best.items() if o and name not in ours]
    return max(mine) / max(others) if mine and others else None


Lines = list[list[str]]
"""Cells of a table, line by line, the header first."""


def table(rows: Sequence[Row], ours: Sequence[str]) -> str:
    """Samples a second of every system's best way, and our speed-up."""
    return grid(table_lines(rows, ours))


def table_lines(rows: Sequence[Row], ours: Sequence[str]) -> Lines:
    """The cells of ``table``."""
    names = list(rows[0]["systems"])
    lines = [["GPUs", "model", *names, "speed-up"]]
    for row in rows:
        best = [best_of(row["systems"][name]) for name in names]
        ratio = speed_up(row, ours)
        lines.append([
            str(row["gpus"]), row["model"],
            *(f"{o['samples_per_sec']:.4g}" if o else "does not fit" for o in best),
            f"{ratio:.2f} x" if ratio else "-",
        ])  # fmt: skip
    return lines


def ways_table(rows: Sequence[Row]) -> str:
    """The best way of every system, what fills its memory, and where its time goes."""
    return f"{grid(ways_lines(rows))}\n{WAYS_LEGEND}"


WAYS_LEGEND = (
    "x: microbatches of a step. GiB: of the fullest GPU. comp, comm, idle: shares of the step "
    "(mean of\nthe GPUs) in which a GPU computes, communicates and does nothing else, or waits."
)


def ways_lines(rows: Sequence[Row]) -> Lines:
    """The cells of ``ways_table``."""
    lines = [["GPUs", "model", "system", "best way", "x", "GiB", "comp", "comm", "idle"]]
    for row in rows:
        for name, found in row["systems"].items():
            best = best_of(found)
            if best is None:
                lines.append([str(row["gpus"]), row["model"], name, "none fits", *[""] * 5])
                continue
            shares = best["shares"]
            lines.append([
                str(row["gpus"]), row["model"], name, best["way"],
                f"{best['num_microbatches']}",
                f"{sum(v for k, v in best['peak_bytes'].items() if k != 'host') / 2**30:.1f}",
                *(f"{shares[part]:.0%}" for part in ("compute", "communication", "bubble")),
            ])  # fmt: skip
    return lines


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The same cells as a table of a document; columns of numbers to the right."""
    head, *body = lines
    numbers = [any(map(_is_number, column)) for column in zip(*body, strict=True)]
    rules = ["---:" if is_number else "---" for is_number in numbers or [False] * len(head)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *body))


def grid(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = [
            cell.rjust(width) if _is_number(cell) else cell.ljust(width)
            for cell, width in zip(line, widths, strict=True)
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def _is_number(cell: str) -> bool:
    """Whether a cell is a number with its unit; the name 3F1B is none."""
    return re.fullmatch(r"[\d.]+(e[+-]?\d+)?( x|%)?", cell) is not None


def plot(rows: Sequence[Row], ours: Sequence[str], title: str, path: Path) -> None:
    """Bars of samples a second, relative to the best baseline of each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    names = list(rows[0]["systems"])
    figure, ax = plt.subplots(figsize=(max(7, 1.1 * len(rows) + 3), 4.2), layout="constrained")
    width = 0.8 / len(names)
    for i, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        for at, row in enumerate(rows):
            best = {n: best_of(row["systems"][n]) for n in names}
            base = max(
                (o["samples_per_sec"] for n, o in best.items() if o and n not in ours), default=None
            )
            mine, x = best[name], at + (i - (len(names) - 1) / 2) * width
            if mine is None or base is None:
                text = "does not fit" if mine is None else "only one that fits"
                ax.text(x, 0.02, text, rotation=90, ha="center", va="bottom", fontsize=7)
                continue
            height = mine["samples_per_sec"] / base
            ax.bar(x, height, width * 0.92, color=colour, label=name if at == 0 else None)
            ax.text(x, height + 0.02, f"{height:.2f}", ha="center", va="bottom", fontsize=7)
    labels = [f"{row['gpus']} GPUs\n{row['model']}" for row in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=7)
    ax.axhline(1, color="grey", lw=0.8)
    ax.set(ylabel="speed over the best baseline", title=title)
    handles = [Patch(color=colour) for colour, _ in zip(COLOURS, names, strict=False)]
    ax.legend(handles, names, frameon=False, fontsize=8, loc="upper left", ncols=len(names))
    ax.set_ylim(0, ax.get_ylim()[1] * 1.15)
    figure.savefig(path, dpi=120)
    plt.close(figure)
