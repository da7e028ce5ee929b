"""The benchmark's picture, in the form of the SuperScaler paper's Figure 17.

A panel per category, and a row of panels per size. Every case has two bars, point-to-point and
rvdcomm, beside marks of the other methods and a line at the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from bench.rvd.cases import Row
from bench.rvd.report import BY_HAND, LIMIT, RATIOS, ratio, times_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS: Mapping[str, tuple[float, str, str]] = {
    "p2p": (-0.36, "#E69F00", "point-to-point; above it P2P ÷ ours"),
    "ours": (-0.06, "#0072B2", "rvdcomm.redistribute"),
}
"""The middle, the colour and the label of each bar of a case."""

BAR_WIDTH = 0.3

MARKS: Mapping[str, tuple[str, str, str]] = {
    "dtensor": ("D", "#56B4E9", "DTensor"),
    BY_HAND: ("P", "#A08500", "torch's collectives by hand, the fastest"),
    "dist": ("^", "#009E73", "rvdcomm, messages alone"),
    "pool": ("*", "#D55E00", "rvdcomm, source in the pool"),
    "peer": ("v", "#CC79A7", "rvdcomm, reading neighbours, into out"),
}
"""The shape, the colour and the label of each mark of a case."""

MARKS_AT = 0.27
"""Where the marks are, right of the middle of the case."""


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the times of all cases on a log scale, as a PNG or SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    sizes, categories = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("size", "category")
    )
    figure, axes = plt.subplots(
        len(sizes),
        len(categories),
        figsize=(2.6 * max(len(categories), 3) + 0.8, 2.7 * len(sizes) + 1.3),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    labelled: dict[str, Any] = {}
    for size, line in zip(sizes, axes, strict=True):
        line[0].set_ylabel(f"{size} float32, {result.get('times', 'median')} ms")
        for category, axis in zip(categories, line, strict=True):
            draw_panel(axis, [r for r in rows if (r["size"], r["category"]) == (size, category)])
            axis.set_title(category)
            handles, labels = axis.get_legend_handles_labels()
            labelled |= dict(zip(labels, handles, strict=True))
    order = [label for *_, label in (*BARS.values(), *MARKS.values())]
    shown = sorted(labelled, key=lambda label: order.index(label) if label in order else len(order))
    columns = min(len(shown), 4)
    handles = [labelled[label] for label in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(fill(result["title"], 110), fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_panel(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the cases of one category and size, side by side."""
    all_ms = [{name: secs * 1e3 for name, secs in times_of(row).items() if secs} for row in rows]
    for name, (middle, colour, label) in BARS.items():
        points = [(x + middle, ms[name]) for x, ms in enumerate(all_ms) if name in ms]
        if points:
            axis.bar(*zip(*points, strict=True), width=BAR_WIDTH, color=colour, label=label)
    for name, (marker, colour, label) in MARKS.items():
        points = [(x + MARKS_AT, ms[name]) for x, ms in enumerate(all_ms) if name in ms]
        if points:
            axis.scatter(*zip(*points, strict=True), marker=marker, c=colour, s=22, label=label)
    limits = [(ms[LIMIT], x - 0.5, x + 0.42) for x, ms in enumerate(all_ms) if LIMIT in ms]
    if limits:
        axis.hlines(*zip(*limits, strict=True), colors="black", linewidth=1.2, label="limit")
    for x, ms in enumerate(all_ms):
        found = ratio(ms, *RATIOS["P2P ÷ ours"])
        if found is not None:
            # Above the line of the limit, which may be at the height of the bar.
            at = x + BARS["p2p"][0], max(ms["p2p"], ms.get(LIMIT, 0.0))
            text = f"{found:.2g}x" if found < 99.5 else f"{found:.0f}x"
            axis.annotate(text, at, (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    axis.set_xticks(range(len(rows)), [row["relation"] for row in rows], fontsize=8)
    axis.set_xlim(-0.7, len(rows) - 0.4)
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
