"""Busy ports: links that communication shares, and the times when they are busy."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable

from superscaler_core.cost.comm_cost import Port

Interval = tuple[int, int]
"""Ticks ``[start, end)``."""

Background = tuple[tuple[Port, tuple[Interval, ...]], ...]
"""Busy intervals of each port."""

Load = tuple[Port, int]
"""A port, and the ticks of work for it."""


class BusyPorts:
    """Busy times of ports, whatever devices send.

    A port serves calls in the program's order; a later call uses the time that earlier calls leave
    free, so no port is idle while a call waits for it.

    Law (tests/superscaler_core/simulator/test_simulator_comm.py): the intervals of a port add up
    to the work that it was given, and no two of them overlap.
    """

    def __init__(self, background: Background = ()) -> None:
        self._busy = defaultdict[Port, list[Interval]](list)
        self._busy.update((port, list(busy)) for port, busy in background)
        self.taken: list[tuple[Port, Interval]] = []
        """The intervals that were reserved since the start, in order."""

    def reserve(self, start: int, duration: int, loads: Iterable[Load]) -> int:
        """The end of a call that begins at ``start`` and takes ``duration`` without other traffic.

        The part of the call that does not use a port comes after the wait for that port.
        """
        end = start + duration
        for port, work in loads:
            if work:
                end = max(end, self._fill(port, start, work) + duration - work)
        return end

    def _fill(self, port: Port, start: int, work: int) -> int:
        """Reserve free time of a port from ``start`` on for this work; return the end."""
        busy = self._busy[port]
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
            insort(busy, interval)
            self.taken.append((port, interval))
        return found[-1][1]

    def replay(self, taken: Iterable[tuple[Port, Interval]], offset: int) -> None:
        """Reserve the same intervals as an equal run whose ports had the same busy times."""
        for port, (start, end) in taken:
            insort(self._busy[port], (start + offset, end + offset))

    def background(self, ports: Iterable[Port], start: int) -> Background:
        """The busy intervals of ports from ``start`` on, relative to ``start``."""
        found = []
        for port in ports:
            busy = self._busy.get(port, [])
            place = bisect_right(busy, start, key=lambda interval: interval[1])
            if place < len(busy):
                later = tuple((max(0, a - start), b - start) for a, b in busy[place:])
                found.append((port, later))
        return tuple(found)
