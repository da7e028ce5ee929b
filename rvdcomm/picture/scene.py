"""Scene: where all of a picture goes: title, columns of ranks, rows of states and steps, notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from rvdcomm.layout import ITEM_BYTES, ranges_text
from rvdcomm.picture.cells import Thumbnails
from rvdcomm.picture.flows import LANE_HEIGHT, Flow, Gap, Pen, draw_flow, flow_of_step, lanes
from rvdcomm.picture.footer import footer, left_out
from rvdcomm.picture.shapes import GREY, MARGIN, Picture, Rect, Shape, Text, shortened, text_width
from rvdcomm.planning.path import State, groups_text
from rvdcomm.plans.planner import Plan
from rvdcomm.units import bytes_text, secs_text

MAX_RANKS = 64
"""Columns that are drawn; the ranks after them are left out, and said so."""
FRAME = "#EEF2F6"
LINE_HEIGHT = 17.0
"""Of the labels at the left."""


def scene_of(plan: Plan) -> Picture:
    """Who sends what to whom in every step of ``plan``."""
    scene = _Scene(plan)
    shapes = [*scene.frames(), *scene.title(), *scene.rows()]
    notes = list(left_out(plan, scene.ranks, scene.flows, scene.cells))
    shapes += footer(plan, scene.flows, scene.cells, notes, (scene.right, scene.end))
    bounds = [s.bounds for s in shapes if isinstance(s, Text)]
    right = max(scene.right, *(right for _, _, right, _ in bounds))
    return Picture(right + MARGIN, max(bottom for *_, bottom in bounds) + MARGIN, tuple(shapes))


@dataclass(frozen=True)
class _Scene:
    """Geometry of one picture. Rows of cells alternate with gaps, in which the messages are."""

    plan: Plan

    # --- what is drawn --------------------------------------------------------------------------

    @cached_property
    def states(self) -> tuple[State, ...]:
        """The placements before, between and after the steps."""
        steps = self.plan.path.steps
        first = steps[0].src if steps else State.of(self.plan.src)
        return first, *(step.dst for step in steps)

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
    def flows(self) -> tuple[Flow, ...]:
        """What every step moves."""
        drawn = frozenset(self.ranks)
        return tuple(flow_of_step(self.plan, i, drawn) for i in range(len(self.plan.path.steps)))

    # --- geometry -------------------------------------------------------------------------------

    @cached_property
    def cells(self) -> Thumbnails:
        """How cells are drawn."""
        n = len(self.ranks)
        width = 62.0 if n <= 8 else 50.0 if n <= 16 else 30.0 if n <= 32 else 20.0
        return Thumbnails(self.plan.src.shape, self.states, width)

    @cached_property
    def gutter(self) -> float:
        """Width of the column of labels at the left."""
        labels = [text for row in (*self._state_labels(), *self._step_labels()) for text in row]
        return max(text.bounds[2] for text in labels) + 26

    @cached_property
    def left(self) -> dict[int, float]:
        """Left edge of every rank's column."""
        x, out = self.gutter, {}
        for _, ranks in self.hosts:
            x += 14
            for rank in ranks:
                out[rank] = x
                x += self.cells.width + self.spacing
            x += 14 - self.spacing + 10
        return out

    @property
    def spacing(self) -> float:
        """Space between two columns."""
        return self.cells.width * 0.3 + 2

    @property
    def right(self) -> float:
        """Right edge of the columns."""
        return self.left[self.ranks[-1]] + self.cells.width + 14

    @cached_property
    def header(self) -> float:
        """Top of the hosts' frames."""
        return MARGIN + 62

    @cached_property
    def tops(self) -> list[float]:
        """Top edge of every row of cells."""
        y = self.header + (46 if self.hosts[0][0] else 30)
        out = []
        for i in range(len(self.states)):
            out.append(y)
            if i < len(self.flows):
                y += self.cells.height + self._gap_height(i)
        return out

    def _gap_height(self, index: int) -> float:
        """Room for the step's labels, for slopes that can be followed, and for bars."""
        flow = self.flows[index]
        # Labels of low rows reach into the gaps.
        overhang = max(3 * LINE_HEIGHT - self.cells.height, 0.0)
        if not flow.links and not flow.bars:
            return 84.0 + overhang
        spans = [abs(self.left[m.src_rank] - self.left[m.dst_rank]) for m in flow.links]
        slope = min(max(0.26 * max(spans, default=0.0), 108.0), 230.0)
        lane_of = lanes(flow.bars, self.left)
        return max(slope, 56 + LANE_HEIGHT * (max(lane_of, default=0) + 1)) + overhang

    @cached_property
    def end(self) -> float:
        """Bottom of the hosts' frames."""
        return self.tops[-1] + self.cells.height + 14

    # --- title, frames, rows --------------------------------------------------------------------

    def title(self) -> Iterator[Shape]:
        """Src and dst, and what tensor it is."""
        plan = self.plan
        shape = "x".join(map(str, plan.src.shape)) or "scalar"
        num_bytes = bytes_text(_num_bytes(plan))
        yield Text(
            MARGIN, MARGIN + 18, f"{plan.src.rvd} → {plan.dst.rvd}", 19, bold=True, mono=True
        )
        text = f"{shape} {plan.dtype}, {num_bytes}, {len(plan.path.ranks)} ranks"
        yield Text(MARGIN, MARGIN + 40, text, 13, color=GREY)

    def frames(self) -> Iterator[Shape]:
        """Hosts, and the numbers of the ranks."""
        for name, ranks in self.hosts:
            x, stop = self.left[ranks[0]] - 14, self.left[ranks[-1]] + self.cells.width + 14
            yield Rect(
                x, self.header, stop - x, self.end - self.header, FRAME, radius=10, tag="host"
            )
            y = self.header + 20
            if name:
                yield Text((x + stop) / 2, y, name, 13, "middle", bold=True, color=GREY)
                y += 17
            for rank in ranks:
                wide = text_width(f"rank {rank}", 11) < self.cells.width
                text = f"rank {rank}" if wide else str(rank)
                size = 11 if self.cells.width >= 30 else 9
                x = self.left[rank] + self.cells.width / 2
                yield Text(x, y, text, size, "middle", color=GREY, tag="rank")

    def rows(self) -> Iterator[Shape]:
        """Every state's cells, and every step's messages."""
        pen = Pen.of(self.flows, self.cells.width)
        for labels, state, top in zip(self._state_labels(), self.states, self.tops, strict=True):
            yield from _stacked(labels, top + self.cells.height / 2)
            for rank in self.ranks:
                if rank in state.placement.by_rank:
                    yield from self.cells.draw(state, rank, self.left[rank], top)
        for i, (labels, flow) in enumerate(zip(self._step_labels(), self.flows, strict=True)):
            top, bottom = self.tops[i] + self.cells.height, self.tops[i + 1]
            yield from _stacked(labels, (top + bottom) / 2)
            gap = Gap(self.left, self.cells.width, top, bottom)
            yield from draw_flow(flow, gap, pen, self.plan)

    def _state_labels(self) -> Iterator[list[Text]]:
        last = len(self.states) - 1
        for i, state in enumerate(self.states):
            name = Text(MARGIN, 0, shortened(state.text), 13, bold=True, mono=True)
            lines = [name]
            if last == 0 or i in (0, last):
                role = "src and dst" if last == 0 else "src" if i == 0 else "dst"
                lines.insert(0, Text(MARGIN, 0, role, 12, color=GREY))
            if state.placement.ranks != self.plan.path.ranks:
                ranks = shortened(f"on {ranges_text(state.placement.ranks)}")
                lines.append(Text(MARGIN, 0, ranks, 11.5, mono=True, color=GREY))
            yield lines

    def _step_labels(self) -> Iterator[list[Text]]:
        for i, (step, cost) in enumerate(
            zip(self.plan.path.steps, self.plan.step_costs, strict=True)
        ):
            name = f"{i}  {step.kind}" + (f" /{step.num_slices}" if step.num_slices > 1 else "")
            lines = [Text(MARGIN + 12, 0, name, 13, bold=True)]
            lines.append(Text(MARGIN + 12, 0, shortened(groups_text(step.groups)), 11.5, mono=True))
            if cost.wire_bytes:
                received = bytes_text(max(cost.recv_bytes.values()))
                lines.append(Text(MARGIN + 12, 0, f"busiest rank gets {received}", 11.5))
                lines.append(Text(MARGIN + 12, 0, secs_text(cost.secs), 11.5))
            else:
                lines.append(Text(MARGIN + 12, 0, "moves nothing", 11.5))
            yield lines


def _stacked(lines: list[Text], middle: float) -> Iterator[Text]:
    """Lines one below another, around the height ``middle``."""
    y = middle - LINE_HEIGHT * (len(lines) - 1) / 2 + 4
    for i, line in enumerate(lines):
        yield replace(line, y=y + LINE_HEIGHT * i)


def _num_bytes(plan: Plan) -> int:
    return prod(plan.src.shape) * ITEM_BYTES[plan.dtype]
