"""Stage run: the inside of one run of a stage in time; equal runs are simulated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from superscaler_core.plan import Device
from superscaler_core.simulator.ports import Background, Interval, Ports
from superscaler_core.simulator.wire import Port, Wire
from superscaler_core.simulator.work import Act


@dataclass(frozen=True)
class StageRun:
    """What devices do from the moment in which the first of them begins, which is tick 0.

    Attributes:
        devices: that take part.
        ends: when each is free again.
        spans: every act with its start and end.
        copies: to and from the host, which take place beside.
        taken: of ports.
    """

    devices: tuple[Device, ...]
    ends: tuple[int, ...]
    spans: tuple[tuple[Act, int, int], ...]
    copies: tuple[tuple[Wire, int, int], ...]
    taken: tuple[tuple[Port, Interval], ...]

    @cached_property
    def computing(self) -> dict[Device, int]:
        """Ticks that each device computes."""
        found = dict.fromkeys(self.devices, 0)
        for act, start, end in self.spans:
            if act.wire is None:
                for device in act.devices:
                    found[device] += end - start
        return found

    @cached_property
    def communicating(self) -> dict[tuple[Device, int], int]:
        """Ticks that each device does nothing but communicate, by level, or wait for a copy."""
        found: dict[tuple[Device, int], int] = {}
        for act, start, end in self.spans:
            if act.wire is not None:
                for device in act.devices:
                    key = device, act.wire.level
                    found[key] = found.get(key, 0) + end - start
        return found

    @cached_property
    def traffic(self) -> dict[tuple[Device, int], int]:
        """Ticks of each device's communication, hidden or not, by level."""
        found: dict[tuple[Device, int], int] = {}
        calls = [(act.wire, start, end) for act, start, end in self.spans if act.wire is not None]
        for wire, start, end in (*calls, *self.copies):
            # A wait for a copy carries nothing: it is the copy that does.
            for device in wire.devices if wire.level_bytes else ():
                key = device, wire.level
                found[key] = found.get(key, 0) + end - start
        return found

    @cached_property
    def busy(self) -> dict[Device, int]:
        """Ticks that each device does either."""
        found = dict(self.computing)
        for (device, _), ticks in self.communicating.items():
            found[device] += ticks
        return found

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that all devices send, by level."""
        found: dict[int, int] = {}
        wires = [act.wire for act, _, _ in self.spans if act.wire is not None]
        for wire in (*wires, *(wire for wire, _, _ in self.copies)):
            for level, count in enumerate(wire.level_bytes):
                found[level] = found.get(level, 0) + count
        return found


class StageRuns:
    """Runs acts on devices that are free at given times.

    A run depends on how far apart its devices begin, and on when the ports that it shares are
    busy; it is remembered by both.

    Args:
        is_memoized: False simulates every run; slow, and the meaning of the other.
    """

    def __init__(self, ports: Ports, *, is_memoized: bool = True) -> None:
        self._ports, self._is_memoized = ports, is_memoized
        self._known: dict[tuple[int, tuple[int, ...], Background], StageRun] = {}
        self._shared: dict[int, tuple[Port, ...]] = {}
        self._kept: dict[int, Sequence[Act]] = {}

    def run(
        self, acts: Sequence[Act], devices: tuple[Device, ...], ready: Sequence[int]
    ) -> tuple[int, StageRun]:
        """The tick at which the first device begins, and the run counted from there.

        Args:
            acts: in an order that every device keeps; equal runs give one object here.
            devices: that take part.
            ready: when each is free.
        """
        base = min(ready)
        late = tuple(tick - base for tick in ready)
        if not self._is_memoized:
            return base, _run(acts, devices, ready, self._ports, base)
        # Acts are told apart by identity, so they are kept alive.
        self._kept[id(acts)] = acts
        background = self._ports.background(self._shared_by(acts), base)
        key = id(acts), late, background
        known = self._known.get(key)
        if known is None:
            known = _run(acts, devices, late, Ports(background), 0)
            self._known[key] = known
        self._ports.replay(known.taken, base)
        return base, known

    def _shared_by(self, acts: Sequence[Act]) -> tuple[Port, ...]:
        key = id(acts)
        if key not in self._shared:
            wires = (w for act in acts for w in (act.wire, act.fetch, act.ahead, act.store))
            ports = {port for wire in wires if wire is not None for port, _ in wire.shared}
            self._shared[key] = tuple(sorted(ports))
        return self._shared[key]


def _run(
    acts: Sequence[Act], devices: tuple[Device, ...], ready: Sequence[int], ports: Ports, base: int
) -> StageRun:
    """Run acts; times of what is returned are counted from ``base``."""
    clock = dict(zip(devices, ready, strict=True))
    first = len(ports.taken)
    coming: dict[Device, int] = {}
    spans: list[tuple[Act, int, int]] = []
    copies: list[tuple[Wire, int, int]] = []

    def copy(wire: Wire, start: int) -> int:
        end = ports.reserve(start, wire.ticks, wire.shared)
        copies.append((wire, start - base, end - base))
        return end

    for act in acts:
        start = max(clock[device] for device in act.devices)
        if act.fetch is not None:
            there = coming.pop(act.devices[0], None) or copy(act.fetch, start)
            if there > start:
                spans.append((_wait_for(act.fetch), start - base, there - base))
                start = there
        if act.ahead is not None:
            coming[act.devices[0]] = copy(act.ahead, start)
        end = start + act.ticks
        if act.wire is not None and act.wire.shared:
            end = ports.reserve(start, act.ticks, act.wire.shared)
        if act.store is not None:
            copy(act.store, end)
        for device in act.devices:
            clock[device] = end
        if end > start:
            spans.append((act, start - base, end - base))
    taken = tuple((port, (a - base, b - base)) for port, (a, b) in ports.taken[first:])
    ends = tuple(clock[device] - base for device in devices)
    return StageRun(devices, ends, tuple(spans), tuple(copies), taken)


def _wait_for(wire: Wire) -> Act:
    """A device waits for a copy from the host; its bytes are counted with the copy."""
    return Act("from host", wire.devices, wire.ticks, replace(wire, level_bytes=()))
