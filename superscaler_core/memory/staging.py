"""Staging: what communication takes besides the shards at both ends."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import rvdcomm as rv
from superscaler_core.program.transfer import Transfer

MAX_STAGED = 1 << 14
"""Transfers whose staging is remembered: devices and layers that are alike meet the same ones."""


def staging_bytes(legs: Iterable[Transfer], topology: rv.Topology | None) -> int:
    """Of the largest of these transfers.

    Args:
        legs: that take place at different times.
        topology: for which communication is planned; one host if None.
    """
    moving = (leg for leg in legs if not leg.is_idle)
    return max((_staged(leg.src, leg.dst, leg.dtype, topology) for leg in moving), default=0)


@lru_cache(maxsize=MAX_STAGED)
def _staged(src: rv.Layout, dst: rv.Layout, dtype: str, topology: rv.Topology | None) -> int:
    plan = rv.plan(src, dst, dtype, topology, executor="dist")
    # Other costs, which take longer to count, are not asked for.
    peak_bytes = plan.peak_bytes if plan.is_counted else plan.cost.peak_bytes
    # The least that any plan needs is its shards.
    return max(0, peak_bytes - plan.bound.peak_bytes)
