"""Picture: predicted against measured steps, one panel per file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Pairs = Sequence[tuple[float, float, int]]
"""Measured and predicted seconds, and the degree of tensor parallelism."""


def draw(panels: Mapping[str, Pairs], path: Path) -> None:
    """Draw each row as a dot; on the line the prediction is exact, between the dashes within 10 %.

    Args:
        panels: rows by the title of their panel.
        path: file of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4.5), layout="constrained", squeeze=False
    )
    for ax, (title, pairs) in zip(axes[0], panels.items(), strict=True):
        for color, tp in enumerate(sorted({tp for *_, tp in pairs})):
            mine = [(measured, found) for measured, found, each in pairs if each == tp]
            ax.scatter(*zip(*mine, strict=True), s=9, color=f"C{color}", label=f"tp {tp}")
        ends = [f([min(a, b) if f is min else max(a, b) for a, b, _ in pairs]) for f in (min, max)]
        for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
            line = [factor * end for end in ends]
            ax.plot(ends, line, style, color="grey", lw=0.8)
        ax.set(xscale="log", yscale="log", title=title, xlabel="measured step, s")
        ax.legend(fontsize="small", frameon=False)
    axes[0][0].set_ylabel("predicted step, s")
    figure.savefig(path, dpi=110)
    plt.close(figure)
