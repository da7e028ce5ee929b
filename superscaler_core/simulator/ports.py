"""Ports: links that communication shares, and when they are busy.

A port serves what comes first in the program's order; what comes later fills the time that is
left, so that no port is idle while something waits for it. Bytes through a port take their time
whoever sends them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable

from superscaler_core.cost.wire import Port

Interval = tuple[int, int]
"""Ticks ``[start, end)``."""

Background = tuple[tuple[Port, tuple[Interval, ...]], ...]
"""When ports are busy, by port."""

Load = tuple[Port, int]
"""A port, and the ticks of work for it."""


class Ports:
    """Busy times of ports.

    Law (tests/superscaler_core/simulator/test_simulator_wire.py): work that is given to a port
    takes, in all, the sum of its times, and no two intervals of a port overlap.
    """

    def __init__(self, background: Background = ()) -> None:
        self._busy: dict[Port, list[Interval]] = {port: list(busy) for port, busy in background}
        self.taken: list[tuple[Port, Interval]] = []
        """What was given since the start, in order."""

    def reserve(self, start: int, duration: int, loads: Iterable[Load]) -> int:
        """When a call ends that begins at ``start`` and takes ``duration`` where nothing is busy.

        What the call does besides its work for a port comes after the wait for that port.
        """
        end = start + duration
        for port, work in loads:
            if work:
                end = max(end, self._fill(port, start, work) + duration - work)
        return end

    def _fill(self, port: Port, start: int, work: int) -> int:
        """Give a port work in the time that it is free from ``start`` on; when it is done."""
        busy = self._busy.setdefault(port, [])
        place = bisect_right(busy, start, key=lambda interval: interval[1])
        now, left, found = start, work, []
        for begin, end in busy[place:]:
            if now < begin:
                stop = min(begin, now + left)
                found.append((now, stop))
                left -= stop - now
            if left == 0:
                break
            now = max(now, end)
        if left:
            found.append((now, now + left))
        for interval in found:
            self._add(port, interval)
            self.taken.append((port, interval))
        return found[-1][1]

    def _add(self, port: Port, interval: Interval) -> None:
        insort(self._busy.setdefault(port, []), interval)

    def replay(self, taken: Iterable[tuple[Port, Interval]], offset: int) -> None:
        """Reserve again what a run took whose ports were busy at the same times."""
        for port, (start, end) in taken:
            self._add(port, (start + offset, end + offset))

    def background(self, ports: Iterable[Port], start: int) -> Background:
        """When ports are busy from ``start`` on, counted from there."""
        found = []
        for port in ports:
            busy = self._busy.get(port, [])
            place = bisect_right(busy, start, key=lambda interval: interval[1])
            if place < len(busy):
                later = tuple((max(0, a - start), b - start) for a, b in busy[place:])
                found.append((port, later))
        return tuple(found)
