"""Nodes: the picture of a network. Nodes that few wires separate lie close together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rvdcomm import Link, Network
from rvdcomm.network import Node, rate_text
from rvdcomm.picture.page import GREY, INK, MARGIN, Page, Point, text_width

RATE_COLORS = ("#0F6E84", "#CC3311", "#882255", "#66788F", "#B8860B", "#3F7F3F")
"""Colours of the rates, fastest first; slower ones share the last."""
MAX_WIDTH, MIN_WIDTH = 5.0, 1.0
RADIUS = 11.0
SPACING = 74.0
"""Distance of two nodes that a wire joins."""
MIN_APART = 0.62
"""The closest that two nodes may come, in such distances."""
Floats = NDArray[np.float64]

STEPS = 300
"""Steps of the layout; it hardly moves any more."""


def figure_of(network: Network) -> Figure:
    """The picture; ``rvdcomm.picture.draw`` says what it shows."""
    at = places(network)
    rates = sorted({wire.link.bytes_per_sec for wire in network.wires}, reverse=True)
    page = Page()
    for wire in network.wires:
        back = network.link(wire.dst, wire.src)
        if back == wire.link and network.nodes.index(wire.src) > network.nodes.index(wire.dst):
            continue
        color, width = _look(rates, wire.link)
        page.curve([at[wire.src], at[wire.dst]], color, width, zorder=1)
        if back != wire.link:
            arrow(page, at[wire.src], at[wire.dst], color, width)
    draw_nodes(page, at)
    _legend(page, network, rates, max(y for _, y in at.values()) + 34)
    page.resize()
    return page.figure


def draw_nodes(page: Page, at: Mapping[Node, Point], bold: Collection[Node] = ()) -> None:
    """Draw ranks as circles, those of ``bold`` with a thick line, and switches as boxes."""
    for node, (x, y) in at.items():
        if isinstance(node, int):
            line = 3.0 if node in bold else 1.4
            page.circle(x, y, RADIUS, facecolor="#FFFFFF", edgecolor=INK, linewidth=line, zorder=3)
            page.text(x, y + 3.6, str(node), 10, ha="center", zorder=4)
        else:
            half = text_width(node, 9) / 2 + 6
            box = (x - half, y - 9, 2 * half, 18)
            page.rect(*box, 3, facecolor="#E4E7EB", edgecolor=GREY, linewidth=1.0, zorder=3)
            page.text(x, y + 3.2, node, 9, ha="center", zorder=4)


def _look(rates: Sequence[float], link: Link) -> tuple[str, float]:
    place = rates.index(link.bytes_per_sec)
    width = MAX_WIDTH * (MIN_WIDTH / MAX_WIDTH) ** (place / max(len(rates) - 1, 1))
    return RATE_COLORS[min(place, len(RATE_COLORS) - 1)], width


def arrow(page: Page, tail: Point, tip: Point, color: str, width: float) -> None:
    """A head on a line, two thirds of the way, so that heads of opposite wires lie apart."""
    x, y = (a + 0.66 * (b - a) for a, b in zip(tail, tip, strict=True))
    angle = math.atan2(tip[1] - tail[1], tip[0] - tail[0])
    size = 5 + width
    sides = [
        (x - size * math.cos(angle + turn), y - size * math.sin(angle + turn))
        for turn in (-0.45, 0.45)
    ]
    for side in sides:
        page.curve([side, (x, y)], color, width, zorder=2)


def _legend(page: Page, network: Network, rates: Sequence[float], y: float) -> None:
    links = {wire.link.bytes_per_sec: wire.link for wire in network.wires}
    for rate in rates:
        color, width = _look(rates, links[rate])
        page.curve([(MARGIN, y - 4), (MARGIN + 28, y - 4)], color, width)
        page.text(MARGIN + 36, y, f"{rate_text(links[rate])} each way", 10)
        y += 16


# --- places ------------------------------------------------------------------------------------


def places(network: Network) -> Mapping[Node, Point]:
    """Points whose distances are close to those in the network (stress majorization).

    Source: Gansner, Koren and North 2004, with weights of 1 / distance squared. It starts from
    classical scaling, so equal networks have equal pictures.
    """
    apart = _distances(network)
    count = len(apart)
    found = _scaled(apart)
    weights = np.where(apart > 0, 1 / np.maximum(apart, 1) ** 2, 0.0)
    laplacian = np.diag(weights.sum(axis=1)) - weights
    inverse = np.linalg.pinv(laplacian)
    for _ in range(STEPS if count > 2 else 0):
        gaps = np.linalg.norm(found[:, None] - found[None], axis=2)
        ratio = weights * apart / np.maximum(gaps, 1e-6)
        found = inverse @ (np.diag(ratio.sum(axis=1)) - ratio) @ found
    found = found - found.min(axis=0)
    gaps = np.linalg.norm(found[:, None] - found[None], axis=2) + np.eye(count) * 1e9
    scale = SPACING * max(1.0, MIN_APART / max(float(gaps.min()), 0.2))
    points = MARGIN + 3 * RADIUS + scale * found
    return {node: (float(x), float(y)) for node, (x, y) in zip(network.nodes, points, strict=True)}


def _distances(network: Network) -> Floats:
    """[nodes, nodes]: the fewest wires between two nodes, in either direction."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import shortest_path

    index = {node: i for i, node in enumerate(network.nodes)}
    ends = [(index[wire.src], index[wire.dst]) for wire in network.wires]
    ones = np.ones(len(ends))
    graph = csr_array((ones, tuple(zip(*ends, strict=True))), shape=(len(index), len(index)))
    hops: Floats = shortest_path(graph, directed=False, unweighted=True)
    return hops


def _scaled(
    apart: Floats,
) -> Floats:
    """[nodes, 2]: classical scaling, turned so that it does not depend on signs of the solver."""
    count = len(apart)
    center = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * center @ apart**2 @ center)
    found: Floats = vectors[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 1e-9))
    # Nodes that are alike may have one place; they are moved apart a little, each its own way.
    angle = np.arange(count) * 2.399963
    found = found + 0.05 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    for axis in range(found.shape[1]):
        if found[np.argmax(np.abs(found[:, axis]) > 1e-3), axis] > 0:
            found[:, axis] *= -1
    return found
