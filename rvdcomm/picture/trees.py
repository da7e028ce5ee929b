"""Trees: the picture of a forest: for some units of elements, who passes them on to whom."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from matplotlib.figure import Figure

from rvdcomm import Network
from rvdcomm.layout import ranges_text
from rvdcomm.picture.nodes import RADIUS, arrow, draw_nodes, places
from rvdcomm.picture.page import GREY, MARGIN, Page
from rvdcomm.synthesis import Forest, Tree

MAX_TREES = 3
"""Trees of a picture, side by side."""

COLORS = ("#0F6E84", "#CC3311", "#B8860B", "#882255", "#3F7F3F", "#66788F")
"""Colours of beats, the first one first; later ones begin again."""

WIDTH = 2.6
PALE = "#D5DAE0"


def figure_of(forest: Forest) -> Figure:
    """The picture; ``rvdcomm.picture.draw`` says what it shows."""
    network = Network(forest.wires)
    at = places(network)
    page = Page()
    shown = list(_largest(forest))
    wide = max(x for x, _ in at.values()) + MARGIN + 3 * RADIUS
    high = max(y for _, y in at.values()) + 34
    beats = 1
    for i, (tree, share) in enumerate(shown):
        moved = {node: (x + i * wide, y) for node, (x, y) in at.items()}
        for wire in network.wires:
            page.curve([moved[wire.src], moved[wire.dst]], PALE, 1.0, zorder=1)
        sides = forest.beats(tree)
        beats = max([beats, *(1 + beat for side in sides for beat in side.values())])
        for hops, starts in zip((tree.sums, tree.copies), sides, strict=True):
            for hop in hops:
                color = COLORS[starts[hop.src, hop.dst] % len(COLORS)]
                for wire in (forest.wires[index] for index in hop.wires):
                    ends = moved[wire.src], moved[wire.dst]
                    page.curve([*ends], color, WIDTH, zorder=2)
                    arrow(page, *ends, color, WIDTH)
        draw_nodes(page, moved, bold={tree.root})
        page.text(
            MARGIN + i * wide,
            high,
            f"root {tree.root}: {'all' if share == 1 else share} of its elements",
            10,
        )
    for beat in range(min(beats, len(COLORS))):
        x = MARGIN + 78 * beat
        page.curve([(x, high + 16), (x + 20, high + 16)], COLORS[beat], WIDTH)
        page.text(x + 26, high + 20, f"beat {beat}", 10)
    page.text(
        MARGIN, high + 40,
        f"{len(shown)} of {sum(1 for _ in forest.trees)} trees; elements of "
        f"{len(forest.demands)} kinds, on ranks {ranges_text(network.ranks)}", 9, color=GREY,
    )  # fmt: skip
    page.resize()
    return page.figure


def _largest(forest: Forest) -> Iterator[tuple[Tree, Fraction]]:
    """A tree of each of the first demands, or several of one: those with the largest shares."""
    by_demand = [
        [(tree, share) for way, share in sorted(ways, key=lambda each: -each[1]) for tree in way]
        for ways in forest.ways
    ]
    depth = max(map(len, by_demand), default=0)
    found = (each[i] for i in range(depth) for each in by_demand if i < len(each))
    yield from (tree for _, tree in zip(range(MAX_TREES), found, strict=False))
