"""Levels: a topology, or what resembles a network, for costs that count by hosts."""

from __future__ import annotations

import rvdcomm as rv
from superscaler_core.errors import PlanError


def levels_of(links: rv.Topology | rv.Network | None) -> rv.Topology | None:
    """The levels by which moves are priced and homes are chosen; None is one host.

    A network that is a tree of equal levels has them; another one has levels that resemble it
    (``Network.nearest_levels``), while its messages are planned for its own wires.

    Raises:
        PlanError: it is neither a topology nor a network.
    """
    if isinstance(links, rv.Network):
        return links.levels or links.nearest_levels
    if links is None or isinstance(links, rv.Topology):
        return links
    raise PlanError(f"topology={links!r}: it is an rvdcomm.Topology or an rvdcomm.Network.")
