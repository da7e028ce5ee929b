"""Grid picture: schedules as pictures, with one row per worker and one box per action."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rvdcomm.whole_file import replacing
from superscaler_core.schedules import ActionKind, Span, Timeline
from superscaler_core.schedules.grid import title
from superscaler_core.simulator.activities import COLOURS, KINDS
from superscaler_core.simulator.picture import MAX_LABELS, new_figure

LIGHTER = 0.5
"""Share of white in the colour of a worker's later stages."""


def draw_grids(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw timelines below each other, on one scale of time; the file's suffix selects the format.

    A box is an action, labelled with its microbatch. On workers with several stages, stages of the
    first half of the model are dark. The two actions of a pair that run at the same time share the
    height of the row.

    Raises:
        PlanError: matplotlib is missing, or cannot write this suffix.
    """
    heights = [0.6 + 0.24 * len(times.rows) for times in timelines]
    figure = new_figure(path, (12, sum(heights) + 0.8))
    panels = figure.subplots(len(timelines), 1, sharex=True, height_ratios=heights, squeeze=False)
    for axes, times in zip(panels[:, 0], timelines, strict=True):
        _panel(axes, times)
        axes.set_xlim(0, max(float(times.makespan) for times in timelines))
        axes.xaxis.get_major_locator().set_params(integer=True)
    shown = {KINDS[span.action.kind] for times in timelines for row in times.rows for span in row}
    boxes = [_box(0, 0, 1, 1, COLOURS[name]) for name in COLOURS if name in shown]
    names = [name for name in COLOURS if name in shown]
    figure.legend(boxes, names, loc="outside lower center", ncols=len(names), frameon=False,
                  fontsize=9)  # fmt: skip
    with replacing(path) as file:
        figure.savefig(file)


def _panel(axes: Any, times: Timeline) -> None:
    schedule, spans = times.schedule, times.spans
    several = schedule.num_stages > schedule.num_workers or len(schedule.routes) > 1
    is_labelled = sum(map(len, times.rows)) <= MAX_LABELS
    for worker, row in enumerate(times.rows):
        for span in row:
            is_later = several and 2 * span.action.stage >= schedule.num_stages
            colour = COLOURS[KINDS[span.action.kind]]
            partner = spans.get(schedule.partners.get(span.action, span.action), span)
            low, high = _heights(span, partner)
            start, secs = float(span.start), float(span.end - span.start)
            axes.add_patch(
                _box(
                    start, worker + low, secs, high - low, _lighter(colour) if is_later else colour
                )
            )
            if is_labelled:
                is_light = is_later or span.action.kind is ActionKind.WEIGHTS
                axes.text(start + secs / 2, worker + (low + high) / 2,
                          str(span.action.microbatch), ha="center", va="center",
                          fontsize=6.5, color="black" if is_light else "white")  # fmt: skip
    axes.set_ylim(len(times.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(times.rows)))
    axes.set_title(title(times), loc="left", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _heights(span: Span, partner: Span) -> tuple[float, float]:
    """The part of a row's height that a box takes: half of it for an action of a pair."""
    if partner is span or partner.start != span.start:
        return -0.42, 0.42
    return (-0.42, 0.0) if span.action.kind is ActionKind.FORWARD else (0.0, 0.42)


def _box(x: float, y: float, width: float, height: float, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=0.6)


def _lighter(colour: str) -> Any:
    from matplotlib.colors import to_rgb

    return tuple(LIGHTER + (1 - LIGHTER) * part for part in to_rgb(colour))
