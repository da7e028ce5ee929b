"""Scene: title, columns of ranks, rows of states and steps, legend and notes of one picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rvdcomm import Plan
from rvdcomm.layout import ITEM_BYTES, ranges_text
from rvdcomm.picture.cells import MAX_RECTS, MIXED, PALETTE, Thumbnails, hatched
from rvdcomm.picture.flows import (
    KEPT,
    LANE_HEIGHT,
    DrawnFlow,
    Gap,
    draw_flow,
    lanes,
    level_color,
    width_per_byte,
)
from rvdcomm.picture.page import GREY, MARGIN, Page, shortened, text_width
from rvdcomm.planning import State, groups_text
from rvdcomm.units import bytes_text, secs_text

MAX_RANKS = 64
"""Columns that are drawn; further ranks are left out, and a note says so."""
FRAME = "#EEF2F6"
LINE_HEIGHT = 17.0
"""Height of a line of the labels at the left."""
LEGEND_WIDTH = 360.0
"""Width of one column of the legend."""

Line = tuple[str, dict[str, Any]]
"""A label, with its size and font."""


def figure_of(plan: Plan) -> Figure:
    """The figure of who sends what to whom in every step of ``plan``."""
    scene = _Scene(plan, Page())
    scene.draw()
    scene.page.resize()
    return scene.page.figure


@dataclass(frozen=True)
class _Scene:
    """Geometry of one picture. Rows of cells alternate with gaps, in which the messages are."""

    plan: Plan
    page: Page

    def draw(self) -> None:
        self._draw_frames()
        self._draw_title()
        self._draw_rows()
        self._draw_footer()

    # --- what is drawn --------------------------------------------------------------------------

    @cached_property
    def states(self) -> tuple[State, ...]:
        """The placements before, between and after the steps."""
        return State(self.plan.src), *(step.dst for step in self.plan.path.steps)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks from left to right, host by host."""
        order = self.plan.topology.order
        return tuple(sorted(self.plan.path.ranks, key=order.__getitem__)[:MAX_RANKS])

    @cached_property
    def hosts(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and ranks of the hosts, from left to right; without hosts, one that has no name."""
        levels = self.plan.topology.levels
        if len(levels) < 2:
            return (("", self.ranks),)
        home = self.plan.topology.homes[1]
        return tuple(
            (f"{levels[1].name} {i}", tuple(rank for rank in self.ranks if home[rank] == i))
            for i in dict.fromkeys(home[rank] for rank in self.ranks)
        )

    @cached_property
    def flows(self) -> tuple[DrawnFlow, ...]:
        """The messages of every step."""
        drawn = frozenset(self.ranks)
        return tuple(DrawnFlow.of(self.plan, i, drawn) for i in range(len(self.plan.path.steps)))

    # --- geometry -------------------------------------------------------------------------------

    @cached_property
    def cells(self) -> Thumbnails:
        """How cells are drawn."""
        n = len(self.ranks)
        width = 62.0 if n <= 8 else 50.0 if n <= 16 else 30.0 if n <= 32 else 20.0
        return Thumbnails(self.plan.src.shape, self.states, width)

    @cached_property
    def left(self) -> dict[int, float]:
        """Left edge of every rank's column."""
        labels = [line for lines in (*self.state_labels, *self.step_labels) for line in lines]
        x = MARGIN + max(text_width(text, **font) for text, font in labels) + 38
        spacing, out = self.cells.width * 0.3 + 2, {}
        for _, ranks in self.hosts:
            for rank in ranks:
                out[rank] = x
                x += self.cells.width + spacing
            x += 38 - spacing
        return out

    @cached_property
    def header(self) -> float:
        """Top of the hosts' frames."""
        return MARGIN + 62

    @cached_property
    def tops(self) -> list[float]:
        """Top edge of every row of cells."""
        out = [self.header + (46 if self.hosts[0][0] else 30)]
        for flow in self.flows:
            out.append(out[-1] + self.cells.height + self._gap_height(flow))
        return out

    def _gap_height(self, flow: DrawnFlow) -> float:
        """Room for the step's labels, for slopes that can be followed, and for bars."""
        # Labels of low rows reach into the gaps.
        overhang = max(3 * LINE_HEIGHT - self.cells.height, 0.0)
        if not flow.arrows and not flow.bars:
            return 84.0 + overhang
        span = max((abs(self.left[a] - self.left[b]) for a, b in flow.arrows), default=0.0)
        num_lanes = max(lanes(flow.bars, self.left), default=0) + 1
        return max(min(max(0.26 * span, 108.0), 230.0), 56 + LANE_HEIGHT * num_lanes) + overhang

    # --- title, frames, rows --------------------------------------------------------------------

    def _draw_title(self) -> None:
        plan = self.plan
        shape = "x".join(map(str, plan.src.shape)) or "scalar"
        num_bytes = bytes_text(prod(plan.src.shape) * ITEM_BYTES[plan.dtype])
        title = f"{plan.src.rvd} → {plan.dst.rvd}"
        self.page.text(MARGIN, MARGIN + 18, title, 19, bold=True, mono=True)
        text = f"{shape} {plan.dtype}, {num_bytes}, {len(plan.path.ranks)} ranks"
        self.page.text(MARGIN, MARGIN + 40, text, 13, color=GREY)

    def _draw_frames(self) -> None:
        """Hosts, and the numbers of the ranks."""
        width = self.cells.width
        for i, (name, ranks) in enumerate(self.hosts):
            x, stop = self.left[ranks[0]] - 14, self.left[ranks[-1]] + width + 14
            height = self.tops[-1] + self.cells.height + 14 - self.header
            look = {"facecolor": FRAME, "gid": f"host-{i}"}
            self.page.rect(x, self.header, stop - x, height, 10, **look)
            y = self.header + 20
            if name:
                self.page.text((x + stop) / 2, y, name, 13, bold=True, ha="center", color=GREY)
                y += 17
            for rank in ranks:
                size = 11 if width >= 30 else 9
                text = f"rank {rank}" if text_width(f"rank {rank}", size) < width else str(rank)
                at = self.left[rank] + width / 2, y
                self.page.text(*at, text, size, ha="center", color=GREY, gid=f"rank-{rank}")

    def _draw_rows(self) -> None:
        """Every state's cells, and every step's messages."""
        per_byte = width_per_byte(self.flows, self.cells.width)
        for i, (state, top) in enumerate(zip(self.states, self.tops, strict=True)):
            self._stack(self.state_labels[i], MARGIN, top + self.cells.height / 2)
            for rank in self.ranks:
                if rank in state.placement.by_rank:
                    self.cells.draw(self.page, i, rank, self.left[rank], top)
        for i, flow in enumerate(self.flows):
            top, bottom = self.tops[i] + self.cells.height, self.tops[i + 1]
            self._stack(self.step_labels[i], MARGIN + 12, (top + bottom) / 2)
            gap = Gap(self.left, self.cells.width, top, bottom)
            draw_flow(self.page, flow, i, gap, per_byte, self.plan.topology)

    @cached_property
    def state_labels(self) -> list[list[Line]]:
        """The labels at the left of every row of cells."""
        labels = []
        for i, state in enumerate(self.states):
            ends = [name for name, at in (("src", 0), ("dst", len(self.flows))) if i == at]
            role: list[Line] = [(" and ".join(ends), {"size": 12})] if ends else []
            name = shortened(state.text), {"size": 13, "bold": True, "mono": True}
            ranks = shortened(f"on {ranges_text(state.placement.ranks)}")
            is_all = state.placement.ranks == self.plan.path.ranks
            on: list[Line] = [] if is_all else [(ranks, {"size": 11.5, "mono": True})]
            labels.append([*role, name, *on])
        return labels

    @cached_property
    def step_labels(self) -> list[list[Line]]:
        """The labels at the left of every gap."""
        labels = []
        for i, (step, cost) in enumerate(
            zip(self.plan.path.steps, self.plan.step_costs, strict=True)
        ):
            name = f"{i}  {step.kind}" + (f" /{step.num_slices}" if step.num_slices > 1 else "")
            lines: list[Line] = [(name, {"size": 13, "bold": True})]
            lines.append((shortened(groups_text(step.groups)), {"size": 11.5, "mono": True}))
            received = max(cost.recv_bytes.values(), default=0)
            texts = [f"busiest rank receives {bytes_text(received)}", secs_text(cost.secs)]
            lines += [(t, {"size": 11.5}) for t in (texts if received else ["moves nothing"])]
            labels.append(lines)
        return labels

    def _stack(self, lines: list[Line], x: float, middle: float) -> None:
        """Lines one below another, around the height ``middle``."""
        y = middle - LINE_HEIGHT * (len(lines) - 1) / 2 + 4
        for i, (text, font) in enumerate(lines):
            self.page.text(x, y + LINE_HEIGHT * i, text, **font)

    # --- footer ---------------------------------------------------------------------------------

    def _draw_footer(self) -> None:
        """Legend, cost against bound, and notes."""
        y = self.tops[-1] + self.cells.height + 46
        entries = dict(self._legend())
        if entries:
            right = max(self.left.values()) + self.cells.width
            num_columns = min(max(int((right - MARGIN) / LEGEND_WIDTH), 1), len(entries))
            self._draw_legend(entries, y, num_columns)
            y += 23 * ceil(len(entries) / num_columns)
        y += 8
        for line in str(self.plan).splitlines():
            if line.startswith(("cost ", "bound ", "gap ")):
                self.page.text(MARGIN, y, line, 12.5, mono=True)
                y += 19
        for i, note in enumerate(self._notes(), start=1):
            self.page.text(MARGIN, y + 18 * i - 10, note, 11.5, color=GREY, gid=f"note-{i}")

    def _draw_legend(self, entries: dict[str, Any], y: float, num_columns: int) -> None:
        self.page.axes.legend(
            *(entries.values(), entries.keys()),
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
            loc="upper left",
            bbox_to_anchor=(MARGIN, y - 10),
            bbox_transform=self.page.axes.transData,
            ncols=num_columns,
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            handlelength=2.2,
            labelspacing=0.75,
            labelcolor=GREY,
            prop={"family": "DejaVu Sans", "size": 12},
        )
        width = max(text_width(text, 12) for text in entries) + 60
        self.page.reach(MARGIN + num_columns * width, y)

    def _legend(self) -> Iterator[tuple[str, Any]]:
        """Texts, and the artists that they explain."""
        topology = self.plan.topology
        for distance in sorted({d for flow in self.flows for d in flow.distances(topology)}):
            color = level_color(distance)
            yield self._level_text(distance), Line2D([], [], color=color, linewidth=2, marker=">")
        if any(flow.kept for flow in self.flows):
            line = {"color": KEPT["color"], "linestyle": KEPT["linestyle"]}
            yield "stays on its rank", Line2D([], [], linewidth=1.4, **line)
        if any(state.placement.num_parts > 1 for state in self.states):
            yield "hatched: a partial sum (value part)", Patch(**hatched(PALETTE[0]))
        colors = list(self.cells.colors.values())
        if len(colors) > 1:
            patches = tuple(Patch(facecolor=color) for color in colors[:4])
            yield f"colour: which piece of {shortened(self.cells.palette_state.text)}", patches

    def _level_text(self, distance: int) -> str:
        """The name of messages that pass the ports of ``distance`` levels."""
        levels = self.plan.topology.levels
        if len(levels) == 1:
            return "message"
        if distance == 1:
            return f"inside a {levels[1].name}"
        return f"between {levels[min(distance, len(levels)) - 1].name}s"

    def _notes(self) -> Iterator[str]:
        """One sentence for everything that the picture does not show."""
        plan, cells, num_ranks = self.plan, self.cells, len(self.plan.path.ranks)
        if len(self.ranks) < num_ranks:
            yield (
                f"Left out: {num_ranks - len(self.ranks)} of {num_ranks} ranks, those after rank "
                f"{self.ranks[-1]}, and their messages."
            )
        sizes = {size for flow in self.flows for size in flow.arrows.values()}
        if len(sizes) > 1:
            yield f"The width of an arrow shows its bytes, up to {bytes_text(max(sizes))}."
        if len(plan.src.shape) > len(cells.dims):
            shown = " and ".join(map(str, cells.dims))
            hidden = ", ".join(map(str, sorted(cells.cut_dims - {*cells.dims})))
            unseen = f"; cuts of dim {hidden} are not shown" if hidden else ""
            yield f"Cells show dims {shown} of {len(plan.src.shape)}{unseen}."
        merged = sum(b.num_messages for flow in self.flows for b in flow.bars if not b.is_sum)
        if merged:
            yield f"Merged: {merged} messages into bars, which join all senders and receivers."
        if len(cells.colors) > len(PALETTE):
            yield f"Colours repeat: {len(cells.colors)} pieces have {len(PALETTE)} colours."
        holdings = [holding for state in self.states for holding in state.placement.holdings]
        rects = [cells.rects(holding.boxes) for holding in holdings]
        if any(fill == MIXED for found in rects for *_, fill in found):
            yield "Grey: several pieces, too thin to be told apart."
        if any(len(found) > MAX_RECTS for found in rects):
            yield f"Cells show the first {MAX_RECTS} boxes of a rank."
