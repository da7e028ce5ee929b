"""Staging: memory of communication besides the shards at both ends."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import rvdcomm as rv
from superscaler_core.program.moved_home import moved_home
from superscaler_core.program.transfer import Transfer

MAX_STAGED = 1 << 14
"""Bound on cached transfers; equal layers, and devices that look alike, have equal transfers."""


def staging_bytes(legs: Iterable[Transfer], topology: rv.Topology | None) -> int:
    """The staging bytes of the largest of these transfers.

    Args:
        legs: transfers that run at different times.
        topology: topology that communication is planned for; one host if None.
    """
    moving = (leg for leg in legs if not leg.is_idle)
    ends = ((*moved_home(leg.src, leg.dst, topology)[:2], leg.dtype) for leg in moving)
    return max((_staged(*each, topology) for each in ends), default=0)


@lru_cache(maxsize=MAX_STAGED)
def _staged(src: rv.Layout, dst: rv.Layout, dtype: str, topology: rv.Topology | None) -> int:
    plan = rv.plan(src, dst, dtype, topology, executor="dist")
    # Only this cost is read, because the others take longer to compute.
    peak_bytes = plan.peak_bytes if plan.is_counted else plan.cost.peak_bytes
    # Any plan needs at least its shards.
    return max(0, peak_bytes - plan.bound.peak_bytes)
