"""Staging: what communication takes besides the shards at both ends."""

from __future__ import annotations

from collections.abc import Iterable

import rvdcomm as rv
from superscaler_core.program.transfer import Transfer


class Staging:
    """Looks at the plans of transfers; devices and layers that are alike meet the same ones.

    Args:
        topology: for which communication is planned; one host if None.
    """

    def __init__(self, topology: rv.Topology | None = None) -> None:
        self._topology = topology
        self._found: dict[tuple[rv.Layout, rv.Layout, str], int] = {}

    def most(self, legs: Iterable[Transfer]) -> int:
        """Of the largest of these transfers."""
        return max((self._bytes(leg) for leg in legs if not leg.is_idle), default=0)

    def _bytes(self, leg: Transfer) -> int:
        key = leg.src, leg.dst, leg.dtype
        if key not in self._found:
            plan = leg.plan(self._topology)
            # Other costs, which take longer to count, are not asked for.
            peak_bytes = plan.peak_bytes if plan.is_counted else plan.cost.peak_bytes
            # The least that any plan needs is its shards.
            self._found[key] = max(0, peak_bytes - plan.bound.peak_bytes)
        return self._found[key]
