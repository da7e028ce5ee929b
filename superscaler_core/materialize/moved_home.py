"""Moved home: transfers that differ only in their devices are priced once, on the first devices.

Stages of a pipeline and groups of a grid repeat the same transfers on other devices. On equal hosts
these transfers cost the same, so one of them stands for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import rvdcomm as rv
from superscaler_core.plan import Device

MAX_MOVED = 1 << 14
"""Bound on cached sets of devices."""


def moved_home(
    src: rv.Layout, dst: rv.Layout, topology: rv.Topology | None
) -> tuple[rv.Layout, rv.Layout, Mapping[Device, Device]]:
    """The same transfer on the first hosts and devices, with the device that each one stands for.

    Laws (tests/superscaler_core/materialize/test_moved_home.py): devices keep their order and their
    distances; the plan of the moved transfer has the cost of the original's.

    Args:
        src, dst: the layouts of the transfer.
        topology: the topology that the transfer is planned for; one host if None. If its groups are
            not equal runs of ranks, nothing is moved.
    """
    devices = frozenset((*src.ranks, *dst.ranks))
    home = _homes(devices, topology)
    if all(device == new for device, new in home.items()):
        return src, dst, home
    new_src, new_dst = (
        rv.Layout(end.shape, end.rvd, [home[device] for device in end.ranks], end.cuts)
        for end in (src, dst)
    )
    return new_src, new_dst, {new: device for device, new in home.items()}


@lru_cache(maxsize=MAX_MOVED)
def _homes(devices: frozenset[Device], topology: rv.Topology | None) -> Mapping[Device, Device]:
    """The new device of each device."""
    if topology is None:
        return _in_order(devices)
    if topology.runs is None:
        return {device: device for device in devices}
    # The first rank of the place that a group gets, by the group's level and index.
    places: dict[tuple[int, int], int] = {}
    used: Counter[tuple[int, int]] = Counter()
    found = {}
    for device in sorted(devices):
        parent, place = (len(topology.levels), 0), topology.runs[0].first
        for level in reversed(range(len(topology.levels))):
            group = level, topology.home(level, device)
            if group not in places:
                places[group] = place + used[parent] * topology.runs[level].size
                used[parent] += 1
            parent, place = group, places[group]
        found[device] = place
    return found


def _in_order(devices: Iterable[Device]) -> Mapping[Device, Device]:
    return {device: new for new, device in enumerate(sorted(devices))}
