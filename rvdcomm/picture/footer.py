"""Footer: what the colours mean, what the plan costs, and what the picture leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rvdcomm.picture.cells import MAX_RECTS, MIXED, PALETTE, Thumbnails, hatched
from rvdcomm.picture.flows import KEPT_COLOR, Flow, level_color
from rvdcomm.picture.shapes import (
    GREY,
    MARGIN,
    Point,
    Polygon,
    Rect,
    Shape,
    Stroke,
    Text,
    arrow_head,
    moved,
    shortened,
    text_width,
)
from rvdcomm.plans.planner import Plan
from rvdcomm.units import bytes_text, secs_text

SWATCH_WIDTH = 26.0
MIN_TEXT_WIDTH = 640.0


def footer(
    plan: Plan, flows: Sequence[Flow], cells: Thumbnails, notes: Sequence[str], box: Point
) -> Iterator[Shape]:
    """Legend, cost against bound, and notes, below ``box[1]`` and about as wide as ``box[0]``."""
    right, top = box
    x, y = MARGIN, top + 32
    entries = list(_legend(plan, flows, cells))
    for swatch, text in entries:
        width = SWATCH_WIDTH + 8 + text_width(text, 12)
        if x > MARGIN and x + width > max(right, MIN_TEXT_WIDTH):
            x, y = MARGIN, y + 26
        yield from (moved(shape, x, y) for shape in swatch)
        yield Text(x + SWATCH_WIDTH + 8, y + 4, text, 12, color=GREY, tag="legend")
        x += width + 18
    y += 38 if entries else 6
    for line in _figures(plan):
        yield Text(MARGIN, y, line, 12.5, mono=True)
        y += 19
    y += 8
    for note in notes:
        yield Text(MARGIN, y, note, 11.5, color=GREY, tag="note")
        y += 18


def left_out(
    plan: Plan, ranks: Sequence[int], flows: Sequence[Flow], cells: Thumbnails
) -> Iterator[str]:
    """One sentence for everything that the picture does not show."""
    num_ranks = len(plan.path.ranks)
    if len(ranks) < num_ranks:
        yield (
            f"Left out: {num_ranks - len(ranks)} of {num_ranks} ranks, those after rank "
            f"{ranks[-1]}, and their messages."
        )
    if len(plan.src.shape) > len(cells.dims):
        shown = " and ".join(map(str, cells.dims))
        hidden = ", ".join(map(str, sorted(cells.cut_dims - {*cells.dims})))
        unseen = f"; cuts of dim {hidden} are not seen" if hidden else ""
        yield f"Cells show dims {shown} of {len(plan.src.shape)}{unseen}."
    merged = sum(flow.num_merged for flow in flows)
    if merged:
        yield f"Merged: {merged} messages into bars, which join all their senders and receivers."
    repeated = sum(flow.num_repeated for flow in flows)
    if repeated:
        yield f"Merged: {repeated} further messages of later windows into the arrows of the first."
    if len(cells.colors) > len(PALETTE):
        yield f"Colours repeat: {len(cells.colors)} pieces have {len(PALETTE)} colours."
    holdings = [holding for state in cells.states for holding in state.placement.holdings]
    rects = [cells.rects(holding.boxes) for holding in holdings]
    if any(rect.fill == MIXED for found in rects for rect in found):
        yield "Grey: several pieces, too thin to be told apart."
    if any(len(found) > MAX_RECTS for found in rects):
        yield f"Cells show the first {MAX_RECTS} boxes of a rank."


def _legend(
    plan: Plan, flows: Sequence[Flow], cells: Thumbnails
) -> Iterator[tuple[Sequence[Shape], str]]:
    """Swatches, drawn to the right of the origin, and what they mean."""
    for distance in sorted({d for flow in flows for d in flow.distances(plan.topology)}):
        color = level_color(distance)
        shaft = Stroke((((4, -9), (4, 3)), ((13, -9), (13, 3)), ((22, -9), (22, 3))), color, 2)
        heads = [arrow_head((x, 8), 7, 3.5, color) for x in (4, 13, 22)]
        yield (shaft, *heads), _level_text(plan, distance)
    if any(flow.kept for flow in flows):
        lines = tuple(((x, -9.0), (x, 9.0)) for x in (4.0, 13.0, 22.0))
        yield (Stroke(lines, KEPT_COLOR, 1.4, (2.0, 3.0)),), "stays on its rank"
    sizes = {link.num_bytes for flow in flows for link in flow.links}
    if len(sizes) > 1:
        wedge = Polygon(((0, 5), (SWATCH_WIDTH, -1), (SWATCH_WIDTH, 5)), GREY)
        yield (wedge,), f"width: bytes, up to {bytes_text(max(sizes))}"
    if any(state.placement.num_parts > 1 for state in cells.states):
        swatch = hatched(Rect(2, -8, 22, 16, PALETTE[0]))
        yield swatch, "one of the value parts that sum to the tensor"
    if len(cells.colors) > 1:
        colors = list(cells.colors.values())[:4]
        width = 24 / len(colors)
        rects = [Rect(1 + width * i, -8, width, 16, c) for i, c in enumerate(colors)]
        yield rects, f"colour: which piece of {shortened(cells.palette_state.text)}"


def _level_text(plan: Plan, distance: int) -> str:
    """What a message is called that passes the ports of so many levels."""
    levels = plan.topology.levels
    if len(levels) == 1:
        return "message"
    if distance == 1:
        return f"inside a {levels[1].name}"
    return f"between {levels[min(distance, len(levels)) - 1].name}s"


def _figures(plan: Plan) -> Iterator[str]:
    """Cost, bound and gap."""
    has_hosts = len(plan.topology.levels) > 1
    for name, cost in (("cost ", plan.cost), ("bound", plan.bound)):
        between = f" ({bytes_text(cost.host_bytes)} between hosts)" if has_hosts else ""
        yield (
            f"{name}  {secs_text(cost.secs)}, {bytes_text(cost.wire_bytes)} on the wire{between}, "
            f"busiest rank gets {bytes_text(cost.recv_bytes)}"
        )
    yield (
        f"gap    {plan.gap:.3g}x   rounds {plan.cost.rounds}   "
        f"peak memory {bytes_text(plan.cost.peak_bytes)} a rank"
    )
