"""Rounds: how many messages one after another any plan needs (derived in docs/bound.md, "Rounds").

In a round a rank sends one message at most and receives one. So what it knows comes from at most
twice as many ranks as before, and what it has is known to at most twice as many. On a network a
message also takes as long as its way.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from rvdcomm.cost.atoms import Atoms
from rvdcomm.cost.ports import Cost
from rvdcomm.layout import Layout
from rvdcomm.network import Links, Network, Node


def with_rounds(bound: Cost, src: Layout, dst: Layout, links: Links, at_once: int = 1) -> Cost:
    """``bound``, which has a latency for each of its rounds, with all rounds that a plan needs.

    ``bound`` itself if ``dst`` has several value parts. ``at_once`` is how many partners a rank may
    have in a round: two if it gets messages from one and reads the memory of another.
    """
    kinds, needs = _needs(src, dst)
    if not needs.any():
        return bound
    latencies = rounds = _rounds(kinds, needs, at_once)
    if isinstance(links, Network):
        # A message that other ranks pass on has the latency of each part of its way.
        latencies = max(rounds, _farthest(kinds, needs, sorted({*src.ranks, *dst.ranks}), links))
    more = max(0, latencies - bound.rounds) * links.least_alpha_secs
    return replace(bound, rounds=max(rounds, bound.rounds), secs=bound.secs + more)


def least_rounds(src: Layout, dst: Layout) -> int:
    """A lower bound on the rounds of any plan; 0 if ``dst`` has several value parts.

    >>> least_rounds(Layout((8,), "R(1)V(1)D(8)"), Layout((8,), "R(8)V(1)D(1)"))
    3
    """
    return _rounds(*_needs(src, dst), at_once=1)


Kinds = NDArray[np.bool_]


def _needs(src: Layout, dst: Layout) -> tuple[Kinds, Kinds]:
    """[kinds, ranks]: the sets of ranks that hold a part of some element, and who needs such a part
    and does not have it.
    """
    ranks = sorted({*src.ranks, *dst.ranks})
    atoms = Atoms.of(src, dst)
    is_some = atoms.sizes > 0
    if dst.rvd.v > 1 or not is_some.any():
        return (np.zeros((0, len(ranks)), np.bool_),) * 2
    index = {rank: i for i, rank in enumerate(ranks)}
    has = atoms.masks(src.placement, index, len(ranks))[:, :, is_some]
    wants = atoms.masks(dst.placement, index, len(ranks))[0][:, is_some]
    holders = np.moveaxis(has, 1, 2).reshape(-1, len(ranks))
    lacking = np.moveaxis(wants[None] & ~has, 1, 2).reshape(-1, len(ranks))
    kinds, of_kind = np.unique(holders, axis=0, return_inverse=True)
    needs = np.zeros(kinds.shape, np.bool_)
    np.logical_or.at(needs, of_kind.reshape(-1), lacking)
    return kinds, needs


def _rounds(kinds: Kinds, needs: Kinds, at_once: int) -> int:
    if not needs.any():
        return 0
    growth, rounds = max(_growth(kinds, needs), 1 + _sources(kinds, needs)), 0
    while (1 + at_once) ** rounds < growth:
        rounds += 1
    return rounds


def _growth(kinds: Kinds, needs: Kinds) -> int:
    """How many times as many know something of a set of holders in the end, those who need a part
    with them.
    """
    return int(np.ceil(1 + needs.sum(axis=1) / kinds.sum(axis=1)).max())


def _sources(kinds: Kinds, needs: Kinds) -> int:
    """From how many other ranks some rank needs something, at least.

    If no two of some sets of holders have a rank in common, a rank that needs something of each set
    needs as many ranks. Small sets are tried first.
    """
    order = np.argsort(kinds.sum(axis=1), kind="stable")
    sets = [int.from_bytes(np.packbits(kind).tobytes(), "big") for kind in kinds[order]]
    most = 0
    for mine in needs[order].T.tolist():
        taken = count = 0
        for each in compress(sets, mine):
            if not taken & each:
                taken, count = taken | each, count + 1
        most = max(most, count)
    return most


def _farthest(kinds: Kinds, needs: Kinds, ranks: list[int], network: Network) -> int:
    """Messages one after another from the nearest holder to the rank that is farthest from it."""
    place = {rank: i for i, rank in enumerate(network.ranks)}
    legs = _legs(network)[np.ix_(*([place[rank] for rank in ranks],) * 2)]
    return max(
        int(legs[held].min(axis=0)[lacking].max())
        for held, lacking in zip(kinds, needs, strict=True)
        if lacking.any()
    )


def _legs(network: Network) -> NDArray[np.int64]:
    """[ranks, ranks]: messages one after another from rank to rank, over ranks between them."""
    place = {rank: i for i, rank in enumerate(network.ranks)}
    near = np.zeros((len(place), len(place)), np.bool_)
    for rank, i in place.items():
        todo, known = list[Node]([rank]), set[Node]()
        while todo:
            for wire in network.out[todo.pop()]:
                if isinstance(wire.dst, int):
                    near[i, place[wire.dst]] = True
                elif wire.dst not in known:
                    known.add(wire.dst)
                    todo.append(wire.dst)
    legs = np.where(np.eye(len(place), dtype=np.bool_), 0, len(place))
    reached = np.eye(len(place), dtype=np.bool_)
    for count in range(1, len(place)):
        further = (reached @ near) & ~reached
        legs[further] = count
        reached |= further
    return legs
