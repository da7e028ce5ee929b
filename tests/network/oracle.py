"""Random networks: directed links of unequal rates, switches, and links that are missing."""

from __future__ import annotations

import random
from contextlib import suppress

import rvdcomm as rv
from rvdcomm.errors import LayoutError
from rvdcomm.network import Node
from tests.oracle import random_layout

RATES = (1e9, 2e9, 2.5e9, 4e9, 8e9)
ALPHAS = (0.0, 1e-6, 1e-5)


def random_network(rng: random.Random, ranks: range | None = None) -> rv.Network:
    """A network of 2 to 8 ranks and up to 3 switches whose ranks all reach each other."""
    ranks = ranks or range(rng.randint(2, 8))
    switches = [f"s{i}" for i in range(rng.choice([0, 0, 1, 2, 3]))]
    nodes: list[Node] = [*ranks, *switches]
    share = rng.choice([0.3, 0.6, 1.0])
    while True:
        wires: dict[tuple[Node, Node], rv.Wire] = {}
        for a in nodes:
            for b in nodes:
                if a != b and rng.random() < share:
                    link = rv.Link(rng.choice(ALPHAS), rng.choice(RATES))
                    wires[a, b] = rv.Wire(a, b, link)
                    if rng.random() < 0.5:
                        wires[b, a] = rv.Wire(b, a, link)
        flags = {name: (rng.random() < 0.2, rng.random() < 0.2) for name in switches}
        with suppress(LayoutError):
            network = rv.Network(
                tuple(wires.values()), tuple(rv.Switch(name, *flags[name]) for name in switches)
            )
            if network.ranks == tuple(ranks):
                return network
        # Some node has no wire or is out of reach: draw again, with more wires.
        share = min(1.0, share + 0.1)


def random_pair_on(rng: random.Random, network: rv.Network) -> tuple[rv.Layout, rv.Layout]:
    """Two layouts on some of the ranks each; ``dst`` has one value part, as trees need it."""
    ranks = [rng.sample(network.ranks, rng.randint(1, len(network.ranks))) for _ in range(2)]
    src, dst = (random_layout(rng, (24, 30), each) for each in ranks)
    if dst.rvd.v > 1:
        dst = rv.Layout(dst.shape, f"R({len(dst.ranks)})V(1)D(1,1)", dst.ranks)
    return src, dst
