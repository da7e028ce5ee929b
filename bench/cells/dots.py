"""Dots: a picture with a row per case, and in each row a dot per method that is compared."""

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
    """Draw a row per case, and a vertical line at 1.

    Args:
        values: values by case, and for each case by method.
        path: file of the picture.
        across: label of the horizontal axis.
        title: title of the picture.
        is_log: whether the horizontal axis is logarithmic.
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
