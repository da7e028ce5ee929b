"""Dots: a picture with a row for every case and a dot for everything that is compared on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SHAPES = "os^vDPX*<>hp"


def draw(
    values: Mapping[str, Mapping[str, float]],
    path: Path,
    *,
    across: str,
    title: str,
    is_log: bool = False,
) -> None:
    """Draw a row for every case, with a line at 1.

    Args:
        values: by case and by what is compared on it.
        path: of the picture.
        across: what the values are.
        title: above all.
        is_log: whether factors, not differences, are as far apart everywhere.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for by_name in values.values() for name in by_name))
    figure, ax = plt.subplots(figsize=(9, 1.5 + 0.22 * len(values)), layout="constrained")
    for number, name in enumerate(names):
        rows = [row for row, by_name in enumerate(values.values()) if name in by_name]
        places = [by_name[name] for by_name in values.values() if name in by_name]
        shape = SHAPES[number % len(SHAPES)]
        ax.scatter(places, rows, s=18, color=f"C{number % 10}", marker=shape, label=name)
    ax.axvline(1, color="grey", lw=0.8)
    ax.set_yticks(range(len(values)), list(values), fontsize=7)
    ax.invert_yaxis()
    ax.set(xlabel=across, title=title)
    if is_log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        ax.tick_params(axis="x", which="both", labelsize=7)
    ax.grid(axis="y", alpha=0.3)
    figure.legend(frameon=False, fontsize=7, ncols=6, loc="outside lower center")
    figure.savefig(path, dpi=120)
    plt.close(figure)
