"""Search: the forests that a planner chooses from, those that are found first come first.

A few ranks on a network without levels: the exact packing. Otherwise trees that are balanced one
after another, in a few styles: fewer units have fewer messages, more are nearer to the bound; a
high price of depth gives trees of few rounds.

Forests are kept by structure: who holds and needs which share of the elements, on which wires. So
the same pair of layouts in another shape costs no search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from rvdcomm.cost import Demand, demands_of, in_units, wires_of_members
from rvdcomm.errors import LayoutError
from rvdcomm.layout import Layout
from rvdcomm.network import Network, Wire
from rvdcomm.synthesis.balance import Style, balance
from rvdcomm.synthesis.doubling import doubling
from rvdcomm.synthesis.forest import Forest, unserved
from rvdcomm.synthesis.packing import pack
from rvdcomm.synthesis.spanning import spanning

MAX_PACKED_RANKS = 8
"""The exact packing of more ranks takes seconds to minutes."""

MAX_RANKS, MAX_DEMANDS = 64, 256
"""There are no forests for more; 64 ranks take seconds."""

MAX_QUICK_RANKS = 128
"""Limit on the ranks of forests of few rounds."""

STYLES = (
    Style(2, 0.3),
    Style(2, 0.3, by_host=True),
    Style(2, 0.05),
    Style(4, 0.3),
    Style(6, 0.3),
    Style(6, 0.05),
)
"""Styles of balanced trees, those that are tried on many ranks first."""

_Maker = Callable[..., Forest | None]
"""Makes a forest of demands, wires and options; None if there is none of its kind."""

NUM_STYLES = {32: len(STYLES), MAX_RANKS: 2}
"""How many styles are tried for up to so many ranks."""


def forests(src: Layout, dst: Layout, network: Network) -> Iterator[Forest]:
    """Forests that take a tensor from ``src`` to ``dst``; none for too many ranks or demands.

    Only ranks of ``src`` and ``dst`` take part, as in ``flow_bound``. All machines find the same
    ones, except that of the exact packing (``is_packed``).

    Raises:
        LayoutError: ``dst`` has several value parts, or a rank is not in the network.
    """
    members = {*src.ranks, *dst.ranks}
    network.check_ranks(members)
    if dst.rvd.v > 1:
        raise LayoutError(f"trees to {dst.rvd}: they lead to layouts of one value part.")
    if len(members) > MAX_RANKS:
        return
    demands = demands_of(src, dst)
    if len(demands) > MAX_DEMANDS:
        return
    wires = wires_of_members(network, members)
    if is_packed(src, dst, network):
        yield from _both(_packed(src, dst, network))
    num_styles = next(n for most, n in NUM_STYLES.items() if len(members) <= most)
    for style in STYLES[:num_styles]:
        made = _by_structure(demands, wires, balance, style)
        assert made is not None
        yield from _both(made)


def _packed(src: Layout, dst: Layout, network: Network) -> Forest:
    wires = wires_of_members(network, {*src.ranks, *dst.ranks})
    made = _by_structure(demands_of(src, dst), wires, pack)
    assert made is not None
    return made


def _by_structure(
    demands: Sequence[Demand], wires: Sequence[Wire], make: _Maker, *options: object
) -> Forest | None:
    """What ``make`` finds for these demands, by what it found for the same shares of elements."""
    mine = unserved(demands)
    unit, alike, order = in_units(mine)
    found = _made(alike, tuple(wires), make, *options)
    return None if found is None else found.sized(mine, order, unit)


@lru_cache(maxsize=256)
def _made(
    demands: tuple[Demand, ...],
    wires: tuple[Wire, ...],
    make: _Maker,
    *options: object,
) -> Forest | None:
    return make(demands, wires, *options)


def least_secs(src: Layout, dst: Layout, network: Network) -> float:
    """No plan takes less, by the dual of the exact packing, if an element is a byte and latencies
    aside; 0 where nothing is packed, or not exactly.
    """
    return _packed(src, dst, network).least_secs if is_packed(src, dst, network) else 0.0


def quick_forest(src: Layout, dst: Layout, network: Network) -> Forest | None:
    """A forest of few rounds; None for too many ranks or demands, or where there is none."""
    members = {*src.ranks, *dst.ranks}
    demands = demands_of(src, dst) if len(members) <= MAX_QUICK_RANKS else ()
    if not 0 < len(demands) <= MAX_DEMANDS:
        return None
    return _by_structure(demands, wires_of_members(network, members), doubling)


def relayed_forests(src: Layout, dst: Layout, network: Network) -> Iterator[Forest]:
    """Forests of few rounds where ranks reach only some others; none for too many ranks."""
    members = {*src.ranks, *dst.ranks}
    demands = demands_of(src, dst) if len(members) <= MAX_RANKS else ()
    if 0 < len(demands) <= MAX_DEMANDS:
        wires = wires_of_members(network, members)
        # Without sums there are no roots to choose.
        for one_root in (True, False) if len(demands[0].parts) > 1 else (True,):
            found = _by_structure(demands, wires, spanning, one_root)
            if found is not None:
                yield found


def _both(forest: Forest) -> Iterator[Forest]:
    """A forest, and with hops of each latency in beats of their own if latencies differ."""
    yield forest
    assert forest.pattern is not None, "forests are sized patterns"
    apart = _apart(forest.pattern)
    if apart.num_turns > 1:
        yield replace(forest, pace="apart", pattern=apart)


@lru_cache(maxsize=256)
def _apart(forest: Forest) -> Forest:
    return replace(forest, pace="apart")


def is_packed(src: Layout, dst: Layout, network: Network) -> bool:
    """Whether a forest may come from a linear program, of which machines find different ones."""
    return (
        dst.rvd.v == 1
        and network.levels is None
        and len({*src.ranks, *dst.ranks}) <= MAX_PACKED_RANKS
    )


def forest_of(src: Layout, dst: Layout, network: Network) -> Forest:
    """Of ``forests``, the one whose busiest wire takes least time.

    Raises:
        LayoutError: as of ``forests``, or there are too many ranks or demands.
    """
    found = min(forests(src, dst, network), key=lambda forest: forest.secs, default=None)
    if found is None:
        raise LayoutError(
            f"trees from {src} to {dst}: at most {MAX_RANKS} ranks and {MAX_DEMANDS} kinds of "
            "elements."
        )
    return found


def bare_forest(src: Layout, dst: Layout, network: Network) -> Forest:
    """The demands that are not served at the start, and the wires, without ways."""
    wires = wires_of_members(network, {*src.ranks, *dst.ranks})
    return Forest(unserved(demands_of(src, dst)), (), tuple(wires))
