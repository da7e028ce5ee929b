"""Flows: the messages of one step, drawn between the cells before it and those after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rvdcomm.layout import Topology
from rvdcomm.picture.shapes import Point, Rect, Shape, Stroke, Text, arrow_head
from rvdcomm.plans.planner import Plan
from rvdcomm.units import bytes_text

# By how many levels' ports a message passes: one rank's port, a host's, a rack's.
LEVEL_COLORS = {1: "#66788F", 2: "#CC3311", 3: "#882255"}
KEPT_COLOR = "#9AA5B1"
MAX_ARROWS = 64
"""Messages of one collective that are drawn one by one; more share a bar."""
MAX_ARROWS_A_STEP = 256
LANE_HEIGHT = 15.0
CROWD_WIDTH = 85.0
"""Widths of all arrows of one step together, at most."""
MIN_WIDTH, MAX_WIDTH = 0.9, 4.5
BEND = 0.34
"""How far a curve goes straight before it turns, as a part of its height."""


@dataclass(frozen=True, slots=True)
class Link:
    """All that ``src_rank`` sends to ``dst_rank``, another rank, in one step."""

    src_rank: int
    dst_rank: int
    num_bytes: int
    num_messages: int


@dataclass(frozen=True)
class Bar:
    """Senders and receivers on one horizontal bar, in place of an arrow for every pair."""

    senders: frozenset[int]
    receivers: frozenset[int]
    num_messages: int
    num_bytes: int
    is_sum: bool

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks on it."""
        return self.senders | self.receivers

    def distance(self, topology: Topology) -> int:
        """How far its farthest message goes."""
        return max(topology.distance(a, b) for a in self.ranks for b in self.ranks)


@dataclass(frozen=True)
class Flow:
    """What one step moves: ``links`` are drawn as arrows, ``bars`` stand for many links each.

    ``kept`` are the ranks that use what they have themselves.
    """

    links: tuple[Link, ...]
    bars: tuple[Bar, ...]
    kept: tuple[int, ...]

    def distances(self, topology: Topology) -> set[int]:
        """How far its messages go: by how many levels' ports."""
        found = {topology.distance(link.src_rank, link.dst_rank) for link in self.links}
        return found | {bar.distance(topology) for bar in self.bars}

    @property
    def max_ends(self) -> int:
        """Arrows that leave, or enter, the cell that has most of them."""
        ends = [(link.src_rank, "out") for link in self.links]
        ends += [(link.dst_rank, "in") for link in self.links]
        ends += [(rank, side) for rank in self.kept for side in ("out", "in")]
        return max(Counter(ends).values(), default=0)

    @property
    def num_merged(self) -> int:
        """Messages that a bar stands for, where they are not one all_reduce."""
        return sum(bar.num_messages for bar in self.bars if not bar.is_sum)

    @property
    def num_repeated(self) -> int:
        """Messages beyond the first on the same arrow."""
        return sum(link.num_messages - 1 for link in self.links)


def flow_of_step(plan: Plan, index: int, ranks: frozenset[int]) -> Flow:
    """The flow of step ``index`` between ``ranks``."""
    step = plan.path.steps[index]
    moves = [move for leg in step.moves(plan.topology) for move in leg]
    kept = sorted({m.dst_rank for m in moves if m.src_rank == m.dst_rank} & ranks)
    counts: dict[tuple[int, ...], dict[tuple[int, int], list[int]]] = {}
    for collective in plan.program.collectives:
        if collective.step != index:
            continue
        pairs = counts.setdefault(collective.ranks, {})
        for pair, num_elements in collective.traffic().items():
            if ranks.issuperset(pair):
                pairs.setdefault(pair, []).append(num_elements * plan.program.item_bytes)
    num_pairs = sum(map(len, counts.values()))
    links: list[Link] = []
    bars: list[Bar] = []
    for pairs in counts.values():
        is_sum = step.kind == "all_reduce"
        if pairs and (is_sum or len(pairs) > MAX_ARROWS or num_pairs > MAX_ARROWS_A_STEP):
            sizes = [size for found in pairs.values() for size in found]
            senders, receivers = map(frozenset, zip(*pairs, strict=True))
            bars.append(Bar(senders, receivers, len(sizes), sum(sizes), is_sum))
            continue
        links += [Link(*pair, sum(sizes), len(sizes)) for pair, sizes in sorted(pairs.items())]
    # A rank that is on a bar keeps what it has through the bar.
    on_bars = {rank for bar in bars for rank in bar.ranks}
    return Flow(tuple(links), tuple(bars), tuple(rank for rank in kept if rank not in on_bars))


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


@dataclass(frozen=True, slots=True)
class Pen:
    """Width of arrows, in one scale for the whole picture: ``max_width`` for ``max_bytes``."""

    max_bytes: int
    max_width: float

    @classmethod
    def of(cls, flows: Sequence[Flow], cell_width: float) -> Pen:
        """The pen with which the most crowded step is still legible."""
        sizes = [link.num_bytes for flow in flows for link in flow.links]
        most_arrows = max((len(flow.links) for flow in flows), default=0)
        most_ends = max((flow.max_ends for flow in flows), default=0)
        room = min(CROWD_WIDTH / max(most_arrows, 1), cell_width / max(most_ends, 1) - 1.5)
        return cls(max(sizes, default=1), max(min(MAX_WIDTH, room), MIN_WIDTH))

    def width(self, num_bytes: int) -> float:
        """Width of the arrow for a message."""
        return MIN_WIDTH + num_bytes / max(self.max_bytes, 1) * (self.max_width - MIN_WIDTH)


def draw_flow(flow: Flow, gap: Gap, pen: Pen, plan: Plan) -> Iterator[Shape]:
    """Arrows and bars of one step."""
    yield from _arrows(flow, gap, pen, plan)
    yield from _bars(flow.bars, gap, plan)


def level_color(distance: int) -> str:
    """Colour of a message that passes the ports of so many levels."""
    return LEVEL_COLORS[min(distance, max(LEVEL_COLORS))]


def _arrows(flow: Flow, gap: Gap, pen: Pen, plan: Plan) -> Iterator[Shape]:
    pairs = [(link.src_rank, link.dst_rank) for link in flow.links]
    ends = [*pairs, *((rank, rank) for rank in flow.kept)]
    start, stop = _ports(ends, gap, 0), _ports(ends, gap, 1)
    room = gap.cell_width / max(flow.max_ends, 1)
    for rank in flow.kept:
        curve = _curve((start[rank, rank], gap.top + 2), (stop[rank, rank], gap.bottom - 2))
        yield Stroke((curve,), KEPT_COLOR, 1.2, dashes=(2.0, 3.0), tag="kept")
    # The farthest are drawn last, so that they stay visible.
    distance = {pair: plan.topology.distance(*pair) for pair in pairs}
    for link in sorted(flow.links, key=lambda m: distance[m.src_rank, m.dst_rank]):
        pair = link.src_rank, link.dst_rank
        width = pen.width(link.num_bytes)
        half = min(2.2 + 0.9 * width, max(room / 2, 2.0))
        length = 2.0 * half
        color = level_color(distance[pair])
        tip = stop[pair], gap.bottom - 2
        curve = _curve((start[pair], gap.top + 2), (tip[0], tip[1] - length + 0.5))
        hint = f"{pair[0]} -> {pair[1]}: {bytes_text(link.num_bytes)}"
        yield Stroke((curve,), color, width, opacity=0.85, tag="message", hint=hint)
        yield arrow_head(tip, length, half, color)


def _ports(ends: Iterable[tuple[int, int]], gap: Gap, side: int) -> dict[tuple[int, int], float]:
    """Where every arrow leaves its cell (side 0) or enters it (side 1).

    Arrows are spread over the cell's edge in the order of the columns at their other ends.
    """
    of_rank: dict[int, list[tuple[int, int]]] = {}
    for pair in ends:
        of_rank.setdefault(pair[side], []).append(pair)
    at: dict[tuple[int, int], float] = {}
    for rank, pairs in of_rank.items():
        pairs.sort(key=lambda pair: gap.left[pair[1 - side]])
        spread = gap.cell_width * 0.92
        margin = (gap.cell_width - spread) / 2
        for i, pair in enumerate(pairs):
            at[pair] = gap.left[rank] + margin + spread * (i + 0.5) / len(pairs)
    return at


def _curve(start: Point, stop: Point) -> tuple[Point, ...]:
    """A curve that leaves and arrives vertically; a line where it can be."""
    (x0, y0), (x1, y1) = start, stop
    if abs(x0 - x1) < 0.05:
        return (start, stop)
    bend = (y1 - y0) * BEND
    return (start, (x0, y0 + bend), (x1, y1 - bend), stop)


def _bars(bars: Sequence[Bar], gap: Gap, plan: Plan) -> Iterator[Shape]:
    if not bars:
        return
    lane_of = lanes(bars, gap.left)
    num_lanes = max(lane_of) + 1
    middle = (gap.top + gap.bottom) / 2
    levels = [middle + (lane - (num_lanes - 1) / 2) * LANE_HEIGHT for lane in lane_of]
    colors = [level_color(bar.distance(plan.topology)) for bar in bars]
    # All verticals lie below all bars: a white halo shows that they pass under, a dot, that they
    # join.
    for bar, color, y in zip(bars, colors, levels, strict=True):
        for x in map(gap.center, sorted(bar.senders)):
            yield Stroke((((x, gap.top + 2), (x, y)),), color, 1.5, tag="stem")
        for x in map(gap.center, sorted(bar.receivers)):
            yield Stroke((((x, y), (x, gap.bottom - 8)),), color, 1.5, tag="stem")
            yield arrow_head((x, gap.bottom - 2), 8, 4, color)
    for bar, color, y in zip(bars, colors, levels, strict=True):
        columns = sorted(map(gap.center, bar.ranks))
        line = (((columns[0], y), (columns[-1], y)),)
        hint = f"{bar.num_messages} messages, {bytes_text(bar.num_bytes)}"
        yield Stroke(line, "#FFFFFF", 8.0, tag="halo")
        yield Stroke(line, color, 4.0, tag="bar", hint=hint)
        for x in columns:
            yield Rect(x - 4, y - 4, 8, 8, color, "#FFFFFF", 1.0, radius=4)
        if bar.is_sum:
            x = sum(columns[:2]) / 2
            yield Rect(x - 8, y - 7, 16, 14, "#FFFFFF", color, 1.2, radius=7)
            yield Text(x, y + 4, "Σ", 11, "middle", bold=True, color=color)
