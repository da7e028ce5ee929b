"""Tables and pictures of studies, from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tables import Lines
from superscaler_core.simulator import PARTS

Row = Mapping[str, Any]
"""The result of a planner for a cell."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")


@dataclass(frozen=True)
class Compared:
    """A comparison of our planner with the baselines: one model on a number of GPUs, one column.

    Attributes:
        column: column of the study, a name of ``study.COLUMNS``.
        gpus: number of GPUs.
        model: label of the model.
        ours: name of our planner.
        baselines: names of the baselines.
        rows: rows of all planners, by name; a row without a plan has a ``problem``.
    """

    column: str
    gpus: int
    model: str
    ours: str
    baselines: tuple[str, ...]
    rows: Mapping[str, Row]

    def speed(self, name: str) -> float | None:
        """Samples per second; None if no plan fits."""
        found = self.rows.get(name, {}).get("samples_per_sec")
        return None if found is None else float(found)

    @property
    def best(self) -> str | None:
        """The name of the fastest baseline; None if no baseline has a plan."""
        speeds = {name: self.speed(name) or 0.0 for name in self.baselines}
        name = max(speeds, key=lambda each: speeds[each])
        return name if speeds[name] else None

    @property
    def factor(self) -> float | None:
        """Our speed over that of the best baseline; None if one of the two has no plan."""
        ours, best = self.speed(self.ours), self.best
        return ours / (self.speed(best) or 0.0) if ours and best else None

    @property
    def ceiling(self) -> float | None:
        """The largest factor that a plan with the computation of the best baseline can reach."""
        best = self.best
        return 1 / float(self.rows[best]["shares"]["compute"]) if best else None


def compared(result: Row) -> list[Compared]:
    """All comparisons in the result of a study."""
    return [Compared(**{**each, "baselines": tuple(each["baselines"])}) for each in result["cells"]]


def factors_text(cells: Sequence[Compared]) -> str:
    """The largest and the least factor, as text."""
    gpus = {cell.factor: cell.gpus for cell in cells if cell.factor}
    if not gpus:
        return "unknown: nowhere do both have a plan"
    return f"{max(gpus):.2f} x on {gpus[max(gpus)]} GPUs, {min(gpus):.2f} x at least"


def speed_lines(cells: Sequence[Compared]) -> Lines:
    """Samples per second of all systems of a column, our factor, and the ceiling."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.baselines))
    ours = list(dict.fromkeys(cell.ours for cell in cells))
    lines = [["GPUs", "model", *names, *ours, "factor", "ceiling"]]
    for cell in cells:
        speeds = [cell.speed(name) for name in (*names, *ours)]
        lines.append([
            str(cell.gpus), cell.model,
            *(f"{speed:.4g}" if speed else "none" for speed in speeds),
            *(f"{x:.2f} x" if x else "-" for x in (cell.factor, cell.ceiling)),
        ])  # fmt: skip
    return lines


PLANS_LEGEND = (
    "x: microbatches of a step. GiB: of the fullest GPU. step: its seconds. Shares of the step, "
    "mean of the GPUs: comp, in which a GPU computes; comm, in which it communicates and does "
    "nothing else; idle, in which it waits."
)


def plan_lines(cells: Sequence[Compared]) -> Lines:
    """The plan of every system, its memory, and the parts of its time."""
    lines = [["GPUs", "model", "system", "plan", "x", "GiB", "step", "comp", "comm", "idle"]]
    for cell in cells:
        for name, row in cell.rows.items():
            head = [str(cell.gpus), cell.model, name]
            if "secs" not in row:
                lines.append([*head, "none", *[""] * 6])
                continue
            lines.append([
                *head, row["plan"], str(row["microbatches"]), f"{row['peak_bytes'] / 2**30:.1f}",
                f"{row['secs']:.4g}", *(f"{row['shares'][part]:.1%}" for part in PARTS),
            ])  # fmt: skip
    return lines


def problem_texts(cells: Sequence[Compared]) -> list[str]:
    """For every system without a plan, the reason."""
    return [
        f"{name}, {cell.gpus} GPUs, {cell.model}: {row['problem']}"
        for cell in cells
        for name, row in cell.rows.items()
        if "problem" in row
    ]


def plot(cells: Sequence[Compared], claim: float, title: str, path: Path) -> None:
    """Draw the factors of all models by column, with the ceilings and the paper's claim."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    places = list(dict.fromkeys((cell.gpus, cell.model) for cell in cells))
    columns = list(dict.fromkeys(cell.column for cell in cells))
    figure, ax = plt.subplots(figsize=(max(7, 0.9 * len(places) + 2), 4.2), layout="constrained")
    width = 0.8 / len(columns)
    for number, column in enumerate(columns):
        for cell in cells:
            if cell.column != column:
                continue
            x = places.index((cell.gpus, cell.model)) + (number + 0.5) * width - 0.4
            if cell.factor is None:
                text = "no baseline has a plan" if cell.speed(cell.ours) else "no plan"
                ax.text(x, 0.03, text, rotation=90, ha="center", va="bottom", fontsize=6)
                continue
            ax.bar(x, cell.factor, 0.92 * width, color=COLOURS[number])
            ax.hlines(cell.ceiling or 0.0, x - width / 2, x + width / 2, color="black", lw=0.8)
            ax.annotate(
                f"{cell.factor:.2f}", (x, 0), (0, 4), ha="center", color="white", weight="bold",
                textcoords="offset points", fontsize=7,
            )  # fmt: skip
        ax.bar(0, 0, color=COLOURS[number], label=f"baselines of {column}")
    ax.plot([], [], color="black", lw=0.8, label="ceiling: all but the compute of the best gone")
    ax.axhline(1, color="grey", lw=0.8)
    ax.axhline(claim, color=COLOURS[4], ls="--", lw=0.8, label=f"the paper: up to {claim} x")
    labels = [f"{gpus} GPUs\n{model}".replace(" s", "\ns") for gpus, model in places]
    ax.set_xticks(range(len(places)), labels, fontsize=6)
    ax.set(ylabel="speed over the best baseline", title=f"{title}, simulated")
    ax.set_xlim(-0.5, len(places) - 0.5)
    ax.set_ylim(0, 1.25 * max(claim, ax.get_ylim()[1]))
    ax.legend(frameon=False, fontsize=7, loc="upper left", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)
