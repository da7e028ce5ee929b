"""The benchmark's table and plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from bench.tables import Lines, grid

BY_HAND = "torch"
"""The method of torch's own collectives; its ways have names of their own after a colon."""

METHODS = ("ours", "pool", "peer", "dist", "p2p", "dtensor", BY_HAND)
TIMES = (*METHODS[:-2], "DTensor", BY_HAND, "limit")
COLUMNS = ("case", "groups", *TIMES, "ours x", "DT x", "T x", "plan")
LEGEND = """\
ours: as called; pool: the same with the source in the pool; peer, dist: compiled, into out.
torch: the fastest of torch's own collectives, called by hand, where DTensor may choose another.
ours x: ours / limit; DT x: DTensor / ours; T x: torch / ours.
plan: ag all_gather, ar all_reduce, rs reduce_scatter, a2a all_to_all, ex exchange, tr transfer."""


def table(result: Mapping[str, Any]) -> str:
    """A table per size, of median times in ms."""
    parts = []
    for size in dict.fromkeys(row["size"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["size"] == size]
        parts.append(f"{size} float32, median ms:")
        parts.append(grid(_filled([COLUMNS, *map(_cells, rows)])))
    return "\n\n".join(parts)


def _filled(lines: Sequence[Sequence[str]]) -> Lines:
    """The lines without columns in which no row has a value."""
    columns = [(head, *cells) for head, *cells in zip(*lines, strict=True) if set(cells) != {"-"}]
    return [*zip(*columns, strict=True)]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    medians = medians_of(row)
    called, limit = medians["ours"], row["limit_secs"]
    groups = f"{_num_ranks(row['src'])}" if row["relation"] == "in group" else row["relation"]
    return (
        row["category"],
        groups,
        *(_ms(medians[name]) if name in medians else "-" for name in METHODS),
        _ms(limit) if limit else "-",
        f"{called / limit:.2f}" if limit else "-",
        *(f"{medians[x] / called:.1f}" if x in medians else "-" for x in ("dtensor", BY_HAND)),
        _steps(row["steps"]),
    )


def medians_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The median time of each method; of ways by hand that of the fastest."""
    found: dict[str, float] = {}
    for name, samples in row["samples"].items():
        method, secs = name.partition(":")[0], median(samples or [inf])
        found[method] = min(secs, found.get(method, inf))
    return {name: secs for name, secs in found.items() if secs < inf}


SHORT = {
    "all_gather": "ag",
    "all_to_all": "a2a",
    "all_reduce": "ar",
    "reduce_scatter": "rs",
    "exchange": "ex",
    "transfer": "tr",
}


def _steps(kinds: Iterable[str]) -> str:
    return "+".join(SHORT.get(kind, kind) for kind in kinds) or "copy"


def _num_ranks(layout: str) -> str:
    from rvdcomm import Layout

    return f"in {len(Layout.parse(layout).ranks)}"


def _ms(secs: float) -> str:
    return f"{secs * 1e3:.3g}" if secs < 0.9995 else f"{secs * 1e3:.0f}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a panel per size: the time of every case by every method, and the limit (log scale)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(row["size"] for row in result["rows"]))
    height = 0.3 * max(sum(row["size"] == s for row in result["rows"]) for s in sizes) + 1.6
    figure, axes = plt.subplots(
        1,
        len(sizes),
        figsize=(4.6 * len(sizes) + 1.2, height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    style = {
        "p2p": ("s", "#E69F00", "point-to-point"),
        "dtensor": ("D", "#56B4E9", "DTensor"),
        BY_HAND: ("P", "#F0E442", "torch's collectives by hand, the fastest"),
        "dist": ("^", "#009E73", "rvdcomm, messages alone"),
        "ours": ("o", "#0072B2", "rvdcomm.redistribute"),
        "pool": ("*", "#D55E00", "the same, source in the pool"),
        "peer": ("v", "#CC79A7", "rvdcomm, reading neighbours, into out"),
    }
    for axis, size in zip(axes[0], sizes, strict=True):
        rows = [row for row in result["rows"] if row["size"] == size]
        for name, (marker, colour, label) in style.items():
            medians = list(map(medians_of, rows))
            points = [(mine[name] * 1e3, i) for i, mine in enumerate(medians) if name in mine]
            if points:
                axis.scatter(*zip(*points, strict=True), marker=marker, c=colour, s=30, label=label)
        limits = [(row["limit_secs"] * 1e3, i) for i, row in enumerate(rows) if row["limit_secs"]]
        if limits:
            axis.scatter(*zip(*limits, strict=True), marker="|", c="black", s=130, label="limit")
        axis.set_xscale("log")
        axis.set_yticks(range(len(rows)), [f"{r['category']}  {r['relation']}" for r in rows])
        axis.set_title(f"{size} float32")
        axis.set_xlabel("median ms")
        axis.grid(axis="both", alpha=0.25)
        axis.set_axisbelow(True)
    axes[0][0].invert_yaxis()
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = min(2 * len(sizes), 4)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(fill(result["title"], 60 * len(sizes)), fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
