"""Picture: devices over time, coloured by activity, with their memory below.

Each device has a bar of what it does, and under it a thin one of communication under way for which
it does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from rvdcomm.whole_file import replacing
from superscaler_core.cost.comm_cost import TICKS_PER_SEC
from superscaler_core.errors import PlanError
from superscaler_core.plan import Device
from superscaler_core.schedules import ActionKind
from superscaler_core.simulator.account import Account
from superscaler_core.simulator.activities import COLOURS, HIDDEN, activity, hidden
from superscaler_core.simulator.live import Series
from superscaler_core.simulator.timeline import Ran, StepTimeline

SECS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
BYTES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
"""Units of axes, the largest first."""

LABEL_WIDTH = 0.008
"""Least share of the step that a run must take to be labelled with its microbatch."""

MAX_BESIDE = 6
"""Most activities whose legend has room beside the title."""

MAX_LABELS = 2000
"""Most runs that are considered for labels."""

BAR = (-0.42, 0.2)
"""Top and bottom of the bar of a device, relative to its row."""

LANE = (0.24, 0.42)
"""Top and bottom of the bar of its hidden communication."""

MAX_ROWS = 64
"""Most devices that are shown; of more devices a regular sample is shown."""


def draw(account: Account, path: str | Path) -> None:
    """Write a picture; the file's suffix selects the format. Errors are those of ``new_figure``."""
    stride = -(-len(account.devices) // MAX_ROWS)
    rows = {device: row for row, device in enumerate(account.devices[::stride])}
    height = 0.4 + 0.28 * len(rows)
    figure = new_figure(path, (12, height + 3.2))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(height, 1.4), 2.2])
    _gantt(above, account, rows)
    _memory(below, account)
    with replacing(path) as file:
        figure.savefig(file)


def new_figure(path: str | Path, inches: tuple[float, float]) -> Any:
    """An empty figure that can be saved at ``path``.

    Raises:
        PlanError: matplotlib is missing, or cannot write this suffix.
    """
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise PlanError(f"cannot draw to {str(path)!r}: use a name in .png, .svg or .pdf.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(
            "a picture needs matplotlib, which is not installed: pip install 'rvdcomm[plot]'."
        ) from None
    return Figure(figsize=inches, dpi=120, layout="constrained")


# --- devices ------------------------------------------------------------------------------------

Bar = tuple[float, float, int]
"""Start and length in seconds, and the row."""


def _gantt(axes: Any, account: Account, rows: Mapping[Device, int]) -> None:
    bars: dict[str, list[Bar]] = {name: [] for name in COLOURS}
    for name, bar in _bars(account.timeline, rows):
        bars[name].append(bar)
    for name, found in bars.items():
        if found:
            _fill(axes, found, name)
    stages = [ran for ran in account.timeline.runs if ran.event.stage >= 0]
    if sum(len(ran.inside.devices) for ran in stages) <= MAX_LABELS:
        _label(axes, stages, rows, LABEL_WIDTH * account.timeline.makespan)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(list(rows.values()), [str(device) for device in rows])
    axes.set_ylabel("device")
    # A long legend would cover the title beside it, so the title is above it.
    is_long = sum(map(bool, bars.values())) > MAX_BESIDE
    axes.set_title(account.headline, loc="left", fontsize=10, pad=20 if is_long else None)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(bars), fontsize=8, frameon=False,
        borderaxespad=0.1, handlelength=1.0, columnspacing=1.0,
    )  # fmt: skip


def _bars(timeline: StepTimeline, rows: Mapping[Device, int]) -> Iterator[tuple[str, Bar]]:
    for ran in timeline.runs:
        for work_event, start, end in ran.inside.spans:
            name = activity(ran.event, work_event)
            for device in work_event.devices:
                if device in rows:
                    begin = (ran.start + start) / TICKS_PER_SEC
                    yield name, (begin, (end - start) / TICKS_PER_SEC, rows[device])
    for device, start, end in timeline.waiting:
        if device in rows:
            times = start / TICKS_PER_SEC, (end - start) / TICKS_PER_SEC
            yield "communication", (*times, rows[device])
    for device, intervals in hidden(timeline).items():
        for start, end in intervals if device in rows else ():
            yield HIDDEN, (start / TICKS_PER_SEC, (end - start) / TICKS_PER_SEC, rows[device])


def _fill(axes: Any, bars: list[Bar], name: str) -> None:
    """Draw all bars of a colour as one collection, because there may be many thousands."""
    from matplotlib.collections import PolyCollection

    top, bottom = LANE if name == HIDDEN else BAR
    corners = [
        [(x, row + top), (x + w, row + top), (x + w, row + bottom), (x, row + bottom)]
        for x, w, row in bars
    ]
    made = PolyCollection(corners, facecolors=COLOURS[name], edgecolors="none", label=name)
    axes.add_collection(made)
    axes.autoscale_view()


def _label(axes: Any, runs: list[Ran], rows: Mapping[Device, int], least: float) -> None:
    """Label every run that has room with its microbatch, and mark its start."""
    for ran in runs:
        colour = "black" if ran.event.kind is ActionKind.RECYCLE else "white"
        for device, end in zip(ran.inside.devices, ran.inside.ends, strict=True):
            if device not in rows or not ran.inside.computing[device]:
                continue
            begin = min(s for work_event, s, _ in ran.inside.spans if device in work_event.devices)
            if end - begin < least:
                continue
            start, stop = ((ran.start + tick) / TICKS_PER_SEC for tick in (begin, end))
            row = rows[device]
            top, bottom = (row + end for end in BAR)
            axes.plot([start, start], [top, bottom], color="white", linewidth=0.8)
            middle, name = ((start + stop) / 2, (top + bottom) / 2), str(ran.event.microbatch)
            axes.text(*middle, name, ha="center", va="center",
                      fontsize=6.5, color=colour, clip_on=True)  # fmt: skip


# --- memory -------------------------------------------------------------------------------------


def _memory(axes: Any, account: Account) -> None:
    """Plot memory over time, for devices with different peaks."""
    from matplotlib import colormaps

    shown: dict[Series, Device] = {}
    for device, series in account.live.items():
        shown.setdefault(series, device)
    colours = colormaps["viridis"]
    for i, device in enumerate(shown.values()):
        series = _smooth(account.live[device], account.secs / 1000)
        secs = [*(time for time, _ in series), account.secs]
        sizes = [size for _, size in series]
        colour = colours(i / max(1, len(shown) - 1) * 0.9)
        axes.step(secs, [*sizes, sizes[-1]], where="post", linewidth=1, color=colour,
                  label=f"device {device}")  # fmt: skip
    # Leave room for the legend above the lines.
    top = max(size for series in account.live.values() for _, size in series)
    _name_unit(axes.xaxis, account.secs, SECS)
    _name_unit(axes.yaxis, top, BYTES)
    axes.set_xlim(0, account.secs)
    axes.set_ylim(0, 1.2 * top or 1.0)
    if len(shown) <= 16:
        axes.legend(loc="upper right", fontsize=7, frameon=False, ncols=min(8, len(shown)))


def _name_unit(axis: Any, most: float, units: Mapping[str, float]) -> None:
    """Show values of up to ``most`` in the largest unit of which they have at least one."""
    from matplotlib.ticker import MaxNLocator

    name = next((name for name, unit in units.items() if most >= unit), [*units][-1])
    unit = units[name]
    # Numbers that are round in a power of 1024 are not those that matplotlib would choose.
    axis.set_ticks([place * unit for place in MaxNLocator(7).tick_values(0, 1.2 * most / unit)])
    axis.set_major_formatter(lambda value, _: f"{value / unit:.4g}")
    axis.set_label_text(name)


def _smooth(series: Series, least_secs: float) -> Series:
    """Remove dips too short to be seen, such as between two consecutive runs."""
    kept = [series[0]]
    for point, then in pairwise((*series[1:], (inf, 0))):
        is_dip = point[1] < min(kept[-1][1], then[1])
        if not is_dip or then[0] - point[0] >= least_secs:
            kept.append(point)
    return tuple(kept)
