"""Memory lines: the memory of devices over time, in as many points as a page has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from superscaler_core.plan import Device
from superscaler_core.simulator import Series

MAX_POINTS = 120_000
"""Most points of all lines together."""

LEAST_POINTS = 400
"""Points that a line has room for in any case."""


def memory_lines(live: Mapping[Device, Series], devices: Sequence[Device]) -> list[dict[str, Any]]:
    """The lines for JSON: devices of equal memory share one, with times in whole nanoseconds.

    Args:
        live: bytes over time, by device.
        devices: the devices that are shown.
    """
    lines: dict[Series, list[Device]] = {}
    for device in devices:
        lines.setdefault(live[device], []).append(device)
    room = max(LEAST_POINTS, MAX_POINTS // len(lines))
    return [
        {
            "devices": mine,
            "ns": [round(secs * 1e9) for secs, _ in points],
            "bytes": [size for _, size in points],
        }
        for series, mine in lines.items()
        for points in [sampled(series, room)]
    ]


def sampled(series: Series, room: int) -> Series:
    """At most about ``room`` points of a series, the largest and the smallest of them included.

    Of each of equally many consecutive points, the first, the largest, the smallest and the last
    are kept.
    """
    if len(series) <= room:
        return series
    length = -(-4 * len(series) // room)
    found: list[tuple[float, int]] = []
    for start in range(0, len(series), length):
        numbers = range(start, min(start + length, len(series)))
        most = max(numbers, key=lambda i: series[i][1])
        least = min(numbers, key=lambda i: series[i][1])
        found += [series[i] for i in sorted({numbers[0], most, least, numbers[-1]})]
    return tuple(found)
