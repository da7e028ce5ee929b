"""Picture of a search: the step time of every trial against its memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rvdcomm.units import bytes_text, secs_text
from rvdcomm.whole_file import replacing
from superscaler_core.evaluation.request import Request, Trial
from superscaler_core.simulator.activities import COLOURS
from superscaler_core.simulator.picture import new_figure

TOO_LARGE = 2
"""Candidates that need more than this many times the memory limit are not shown."""


def _ticks(least: float, most: float, num: int = 6) -> list[float]:
    """Sizes to name on a logarithmic axis: at least ``num``, of equal ratios, round to 2 digits."""
    if most <= least:
        return [least]
    step = (most / least) ** (1 / (num - 1))
    sizes = [least * step**i for i in range(num)]
    units = [1 << (10 * ((int(size).bit_length() - 1) // 10)) for size in sizes]
    return [float(f"{size / unit:.2g}") * unit for size, unit in zip(sizes, units, strict=True)]


def draw(request: Request, tried: Sequence[Trial], best: Trial, path: str | Path) -> None:
    """Draw the trials of a search; the file's suffix selects the format.

    A dot is a plan that fits, and the star is the chosen one. The dashed line is the memory of a
    device. Plans beyond this line were not simulated: ticks at the top show their memory.
    """
    figure = new_figure(path, (8, 5))
    axes = figure.subplots()
    limit = request.memory_bytes
    fits = [trial for trial in tried if trial.fits]
    lacking = [trial for trial in tried if trial.lacks_memory]
    for label, trials, marker, size, colour in (
        ("fits", fits, "o", 22, COLOURS["forward"]),
        ("chosen", [best], "*", 190, COLOURS["communication"]),
    ):
        secs = [trial.secs for trial in trials]
        sizes = [trial.peak_bytes for trial in trials]
        axes.scatter(sizes, secs, size, colour, marker=marker, label=label, linewidths=0)
    shown = [t.peak_bytes for t in lacking if t.peak_bytes <= TOO_LARGE * limit]
    axes.plot(shown, [0.985] * len(shown), "|", color=COLOURS["weights"], markersize=9,
              transform=axes.get_xaxis_transform(), label="needs more memory")  # fmt: skip
    label = f"memory of a device, {bytes_text(limit)}"
    axes.axvline(limit, color="0.4", linestyle="--", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    sizes = [trial.peak_bytes for trial in (*fits, best)] + [*shown, limit]
    axes.set_xticks(_ticks(min(sizes), max(sizes)))
    axes.xaxis.set_minor_formatter(lambda size, _: "")
    axes.xaxis.set_major_formatter(lambda size, _: bytes_text(size))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda secs, _: secs_text(secs))
    axes.yaxis.set_minor_formatter(lambda secs, _: secs_text(secs))
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_xlabel("memory of the fullest device")
    axes.set_ylabel("simulated time of a step")
    name = request.graph_of(best.candidate.samples).name
    title = f"{name} on {len(request.devices)} x {request.profile.name}"
    axes.set_title(
        f"{title}: {secs_text(best.secs)}\n{best.candidate.name}", loc="left", fontsize=9
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    with replacing(path) as file:
        figure.savefig(file)
