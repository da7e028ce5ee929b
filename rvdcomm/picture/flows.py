"""Flows: the messages of one step, drawn between the cells before it and those after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rvdcomm import Plan, Topology
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.picture.page import Page, Point

Pair = tuple[int, int]
"""A rank that sends, and the rank that receives."""

# By the number of levels whose ports a message passes: a rank's port, a host's, a rack's.
LEVEL_COLORS = {1: "#66788F", 2: "#CC3311", 3: "#882255"}
KEPT: dict[str, Any] = {"color": "#9AA5B1", "width": 1.2, "linestyle": (0, (1.7, 2.5))}
MAX_ARROWS = 64
"""Messages of one group that are drawn one by one; more share a bar."""
MAX_ARROWS_PER_STEP = 256
LANE_HEIGHT = 15.0
CROWD_WIDTH = 85.0
"""Widths of all arrows of one step together, at most."""
MIN_WIDTH, MAX_WIDTH = 0.9, 4.5
BEND = 0.34
"""How far a curve goes straight before it turns, as a part of its height."""


@dataclass(frozen=True)
class Bar:
    """Senders and receivers on one horizontal bar, in place of an arrow for every pair."""

    senders: frozenset[int]
    receivers: frozenset[int]
    num_messages: int
    is_sum: bool

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks on it."""
        return self.senders | self.receivers


@dataclass(frozen=True)
class DrawnFlow:
    """What one step moves: an arrow per pair with its bytes, and bars for many pairs each.

    ``kept`` are the ranks, besides those on bars, that use data of their own.
    """

    arrows: Mapping[Pair, int]
    bars: tuple[Bar, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, index: int, ranks: frozenset[int]) -> DrawnFlow:
        """The flow of step ``index`` between ``ranks``."""
        step = plan.path.steps[index]
        group_of = {rank: i for i, group in enumerate(step.groups) for rank in group}
        kept: set[int] = set()
        sizes: dict[int, Counter[Pair]] = {}
        for pair, num_elements in _messages(plan, index):
            if not ranks.issuperset(pair):
                continue
            if pair[0] == pair[1]:
                kept.add(pair[0])
            elif num_elements:
                of_group = sizes.setdefault(group_of[pair[0]], Counter())
                of_group[pair] += num_elements * ITEM_BYTES[plan.dtype]
        is_sum = step.kind == "all_reduce"
        is_crowded = sum(map(len, sizes.values())) > MAX_ARROWS_PER_STEP
        arrows: dict[Pair, int] = {}
        bars: list[Bar] = []
        for pairs in sizes.values():
            if is_sum or is_crowded or len(pairs) > MAX_ARROWS:
                senders, receivers = map(frozenset, zip(*pairs, strict=True))
                bars.append(Bar(senders, receivers, len(pairs), is_sum))
            else:
                arrows.update(sorted(pairs.items()))
        kept -= {rank for bar in bars for rank in bar.ranks}
        return cls(arrows, tuple(bars), tuple(sorted(kept)))

    def distances(self, topology: Topology) -> set[int]:
        """The distances of its messages: the number of levels whose ports each one passes."""
        return {topology.distance(*pair) for pair in self.arrows} | {
            _distance(bar, topology) for bar in self.bars
        }

    @property
    def ends(self) -> list[Pair]:
        """All lines from cell to cell."""
        return [*self.arrows, *((rank, rank) for rank in self.kept)]

    @property
    def max_ends(self) -> int:
        """Lines that leave, or enter, the cell that has most of them."""
        ends = Counter((side, pair[side]) for pair in self.ends for side in (0, 1))
        return max(ends.values(), default=1)


def _messages(plan: Plan, index: int) -> Iterator[tuple[Pair, int]]:
    """(from rank, to rank) and elements of all messages of a step."""
    if plan.forest is not None:
        yield from ((pair, num_elements) for _, pair, num_elements in plan.program.traffic())
        return
    for moves in plan.path.steps[index].moves(plan.topology):
        yield from (((move.src_rank, move.dst_rank), move.box.num_elements) for move in moves)


@dataclass(frozen=True)
class Gap:
    """The space between two rows of cells: ``left[rank]`` is the left edge of its column."""

    left: Mapping[int, float]
    cell_width: float
    top: float
    bottom: float

    def center(self, rank: int) -> float:
        """The middle of a column."""
        return self.left[rank] + self.cell_width / 2


def width_per_byte(flows: Sequence[DrawnFlow], cell_width: float) -> float:
    """The width that a byte adds to an arrow, such that the most crowded step stays legible."""
    sizes = [size for flow in flows for size in flow.arrows.values()]
    rooms = (
        min(CROWD_WIDTH / max(len(flow.arrows), 1), cell_width / flow.max_ends - 1.5)
        for flow in flows
    )
    return max(min([MAX_WIDTH, *rooms]) - MIN_WIDTH, 0.0) / max(sizes, default=1)


def lanes(bars: Sequence[Bar], left: Mapping[int, float]) -> list[int]:
    """For every bar, the lowest lane in which it meets no other."""
    ends: list[float] = []
    found = []
    for bar in bars:
        first, last = (pick(left[rank] for rank in bar.ranks) for pick in (min, max))
        lane = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[lane : lane + 1] = [last]
        found.append(lane)
    return found


def level_color(distance: int) -> str:
    """Colour of a message that passes the ports of ``distance`` levels."""
    return LEVEL_COLORS[min(distance, max(LEVEL_COLORS))]


def draw_flow(
    page: Page, flow: DrawnFlow, index: int, gap: Gap, per_byte: float, topology: Topology
) -> None:
    """Arrows and bars of step ``index``; a byte adds ``per_byte`` to the width of an arrow."""
    start, stop = (_ports(flow.ends, gap, side) for side in (0, 1))
    room = gap.cell_width / flow.max_ends
    for rank in flow.kept:
        at = rank, rank
        page.curve(_curve((start[at], gap.top + 2), (stop[at], gap.bottom - 2)), **KEPT)
    # The farthest are drawn last, so that they stay visible.
    for pair in sorted(flow.arrows, key=lambda pair: topology.distance(*pair)):
        width = MIN_WIDTH + per_byte * flow.arrows[pair]
        half = min(2.2 + 0.9 * width, max(room / 2, 2.0))
        color = level_color(topology.distance(*pair))
        tip = stop[pair], gap.bottom - 2
        curve = _curve((start[pair], gap.top + 2), (tip[0], tip[1] - 2 * half + 0.5))
        name = f"message-{index}-{pair[0]}-{pair[1]}"
        page.curve(curve, color, width, alpha=0.85, gid=name)
        page.head(tip, 2 * half, half, color)
    _draw_bars(page, flow.bars, gap, topology)


def _ports(ends: Iterable[Pair], gap: Gap, side: int) -> dict[Pair, float]:
    """Where every line leaves its cell (side 0) or enters it (side 1).

    Lines are spread over the cell's edge in the order of the columns at their other ends.
    """
    of_rank: dict[int, list[Pair]] = {}
    for pair in ends:
        of_rank.setdefault(pair[side], []).append(pair)
    at: dict[Pair, float] = {}
    spread = gap.cell_width * 0.92
    for rank, pairs in of_rank.items():
        pairs.sort(key=lambda pair: gap.left[pair[1 - side]])
        for i, pair in enumerate(pairs):
            at[pair] = gap.center(rank) + spread * ((i + 0.5) / len(pairs) - 0.5)
    return at


def _curve(start: Point, stop: Point) -> tuple[Point, ...]:
    """A curve that leaves and arrives vertically; a line where it can be."""
    (x0, y0), (x1, y1) = start, stop
    if abs(x0 - x1) < 0.05:
        return (start, stop)
    bend = (y1 - y0) * BEND
    return (start, (x0, y0 + bend), (x1, y1 - bend), stop)


def _draw_bars(page: Page, bars: Sequence[Bar], gap: Gap, topology: Topology) -> None:
    lane_of = lanes(bars, gap.left)
    middle = (gap.top + gap.bottom) / 2 - max(lane_of, default=0) * LANE_HEIGHT / 2
    placed = [
        (bar, level_color(_distance(bar, topology)), middle + lane * LANE_HEIGHT)
        for bar, lane in zip(bars, lane_of, strict=True)
    ]
    # All verticals are drawn below all bars. A white halo shows that a vertical passes under a bar,
    # a dot shows that it joins the bar.
    for bar, color, y in placed:
        for x in map(gap.center, sorted(bar.senders)):
            page.curve(((x, gap.top + 2), (x, y)), color, 1.5)
        for x in map(gap.center, sorted(bar.receivers)):
            page.curve(((x, y), (x, gap.bottom - 8)), color, 1.5)
            page.head((x, gap.bottom - 2), 8, 4, color)
    for bar, color, y in placed:
        columns = sorted(map(gap.center, bar.ranks))
        ends = (columns[0], y), (columns[-1], y)
        page.curve(ends, "#FFFFFF", 8.0)
        page.curve(ends, color, 4.0, gid=f"bar-{min(bar.ranks)}")
        for x in columns:
            page.rect(x - 4, y - 4, 8, 8, 4, facecolor=color, edgecolor="#FFFFFF", linewidth=1)
        if bar.is_sum:
            disc = {"boxstyle": "circle,pad=0.2", "facecolor": "#FFFFFF", "edgecolor": color}
            at = sum(columns[:2]) / 2, y + 4
            page.text(*at, "Σ", 11, bold=True, ha="center", color=color, bbox=disc)


def _distance(bar: Bar, topology: Topology) -> int:
    """The number of levels whose ports the farthest message of a bar passes."""
    return max(topology.distance(a, b) for a in bar.ranks for b in bar.ranks)
