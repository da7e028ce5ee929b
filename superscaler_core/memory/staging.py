"""Staging: memory of communication besides the shards at both ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import rvdcomm as rv
from superscaler_core.plan import Device
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.moved_home import moved_home
from superscaler_core.program.transfer import Transfer

MAX_STAGED = 1 << 14
"""Bound on cached transfers; equal layers, and devices that look alike, have equal transfers."""

Moves = tuple[tuple[Transfer, ...], str, Iterable[Device]]
"""Transfers, the dtype of what moves, and the devices that take part."""


def staging_by_device(made: Materialized, master_dtype: str | None) -> Mapping[Device, int]:
    """For each device, the staging bytes of the largest transfer of a step.

    Args:
        made: the plan.
        master_dtype: dtype of stored parameters, in which gradients move; the model's if None.
    """
    # Equal ends have one tuple of transfers.
    known: dict[tuple[int, str], int] = {}
    found: dict[Device, int] = {}
    for legs, dtype, devices in _moves(made, master_dtype):
        key = id(legs), dtype
        if key not in known:
            sizes = (_staged(leg.of_dtype(dtype), made.topology) for leg in legs)
            known[key] = max(sizes, default=0)
        for device in devices if known[key] else ():
            found[device] = max(found.get(device, 0), known[key])
    return found


def _moves(made: Materialized, master_dtype: str | None) -> Iterable[Moves]:
    for edge in made.edges.all:
        for legs in (edge.forward, edge.backward):
            yield legs, edge.tensor.dtype, edge.devices
    for use in made.weights.uses:
        devices = {*use.side.shards, *use.storage.shards}
        yield use.fetch, use.tensor.dtype, devices
        yield use.reduce, master_dtype or use.tensor.dtype, devices


@lru_cache(maxsize=MAX_STAGED)
def _staged(leg: Transfer, topology: rv.Topology | None) -> int:
    if leg.is_idle:
        return 0
    src, dst = moved_home(leg.src, leg.dst, topology)[:2]
    plan = rv.plan(src, dst, leg.dtype, topology, executor="dist")
    # Only this cost is read, because the others take longer to compute.
    peak_bytes = plan.peak_bytes if plan.is_counted else plan.cost.peak_bytes
    # Any plan needs at least its shards.
    return max(0, peak_bytes - plan.bound.peak_bytes)
