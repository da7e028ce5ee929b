"""Stage run: simulates the inside of one run of a stage; equal runs are simulated once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from superscaler_core.cost.comm_cost import Port
from superscaler_core.known import ByKey, remembers
from superscaler_core.plan import Device
from superscaler_core.program.verb import Phase
from superscaler_core.simulator.busy_ports import BusyPorts, Interval
from superscaler_core.simulator.work import WorkEvent

Span = tuple[WorkEvent, int, int]
"""An event with its start and end."""


@dataclass(frozen=True)
class StageRun:
    """The timeline of a run, from tick 0, at which its first device begins.

    Attributes:
        devices, ends: devices that take part, and when each is free again.
        issued: how long the host of each device issues work.
        spans: every act with its start and end.
        beside: what runs in the background: started communication, and copies to and from the host.
        taken: reserved intervals of ports.
        under_way: background work that the devices have started by the end, even if it has ended.
    """

    devices: tuple[Device, ...]
    ends: tuple[int, ...]
    issued: tuple[int, ...]
    spans: tuple[Span, ...]
    beside: tuple[Span, ...]
    taken: tuple[tuple[Port, Interval], ...]
    under_way: UnderWay

    def of_half(self, half: int) -> StageRun:
        """The part of one action in a run of a pair."""
        spans, beside = (
            tuple(span for span in spans if span[0].half == half)
            for spans in (self.spans, self.beside)
        )
        return replace(self, spans=spans, beside=beside)

    @cached_property
    def computing(self) -> dict[Device, int]:
        """Ticks in which each device computes."""
        found = dict.fromkeys(self.devices, 0)
        for event, start, end in self.spans:
            if event.comm is None:
                for device in event.devices:
                    found[device] += end - start
        return found

    @cached_property
    def communicating(self) -> dict[tuple[Device, int], int]:
        """Ticks in which each device only communicates or waits for a copy, by level."""
        found: Counter[tuple[Device, int]] = Counter()
        for event, start, end in self.spans:
            if event.comm is not None:
                for device in event.devices:
                    found[device, event.comm.level] += end - start
        return found

    @cached_property
    def traffic(self) -> dict[tuple[Device, int], int]:
        """Ticks of each device's communication, hidden or not, by level."""
        found: Counter[tuple[Device, int]] = Counter()
        for event, start, end in (*self.spans, *self.beside):
            # A wait itself moves nothing; the communication that it waits for does.
            if event.comm is not None and event.comm.level_bytes:
                for device in event.comm.devices:
                    found[device, event.comm.level] += end - start
        return found

    @cached_property
    def busy(self) -> dict[Device, int]:
        """Ticks in which each device computes or communicates."""
        found = dict(self.computing)
        for (device, _), ticks in self.communicating.items():
            found[device] += ticks
        return found

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that all devices send, by level."""
        found: Counter[int] = Counter()
        for event, _, _ in (*self.spans, *self.beside):
            found.update(dict(enumerate(() if event.comm is None else event.comm.level_bytes)))
        return found


@dataclass
class UnderWay:
    """Background work that devices have started; each device does it one after another.

    It is known when a device has finished all of it (``free``), and what it started under a key
    (``ends``), until it has waited for that.
    """

    free: dict[Device, int] = field(default_factory=dict)
    ends: dict[tuple[str, Device], int] = field(default_factory=dict)

    def since(self, base: int, devices: Iterable[Device]) -> UnderWay:
        """The part that is still to be waited for after ``base``, relative to ``base``."""
        mine = set(devices)
        return UnderWay(
            {d: end - base for d, end in self.free.items() if d in mine and end > base},
            {key: max(0, end - base) for key, end in self.ends.items() if key[1] in mine},
        )

    def replace(self, devices: Iterable[Device], now: UnderWay, base: int) -> None:
        """After a run of devices: their background work is ``now``, relative to ``base``."""
        mine = set(devices)
        self.free |= {device: base + end for device, end in now.free.items()}
        self.ends = {key: end for key, end in self.ends.items() if key[1] not in mine}
        self.ends |= {key: base + end for key, end in now.ends.items()}

    @property
    def key(self) -> tuple[Hashable, ...]:
        """A hashable value that is equal for equal background work."""
        return *sorted(self.free.items()), *sorted(self.ends.items())


class StageRuns:
    """Runs events on devices that become free at given times.

    A run depends on the differences of the start times of its devices and of their hosts, on their
    background work, and on the busy times of its shared ports; results are cached by all of these.

    Args:
        ports: busy times of what communication shares.
        wake_ticks: as ``wake_secs`` of ``DeviceProfile``.
        is_memoized: False simulates every run anew; this is slow, and defines the result.
    """

    def __init__(self, ports: BusyPorts, *, wake_ticks: int = 0, is_memoized: bool = True) -> None:
        self._ports, self._wake_ticks, self._is_memoized = ports, wake_ticks, is_memoized
        self._known: dict[tuple[Hashable, ...], StageRun] = {}

    def run(
        self,
        events: Sequence[WorkEvent],
        devices: tuple[Device, ...],
        ready: Sequence[int],
        hosts: Sequence[int],
        under_way: UnderWay,
    ) -> tuple[int, StageRun]:
        """The tick at which the first device begins, and the run relative to that tick.

        Args:
            events: in an order that every device keeps; equal runs pass the same object.
            devices, ready, hosts: devices that take part, and when each and its host are free.
            under_way: background work started before; updated in place.
        """
        base, wake = min(ready), self._wake_ticks
        before = under_way.since(base, devices)
        if self._is_memoized:
            # Events are compared by identity; the key keeps them alive.
            same, late = ByKey(id(events), events), tuple(tick - base for tick in ready)
            # A host that is early enough is never waited for, however early it is.
            issued = self._issued_by(same, devices)
            hosts = [max(h, t - n) - base for h, t, n in zip(hosts, ready, issued, strict=True)]
            background = self._ports.background(self._shared_by(same), base)
            key = same, late, tuple(hosts), background, before.key
            if key not in self._known:
                ports = BusyPorts(background)
                self._known[key] = _Inside(devices, late, hosts, ports, 0, before, wake).run(events)
            run = self._known[key]
            self._ports.replay(run.taken, base)
        else:
            run = _Inside(devices, ready, hosts, self._ports, base, before, wake).run(events)
        under_way.replace(devices, run.under_way, base)
        return base, run

    @remembers()
    def _shared_by(self, events: ByKey[Sequence[WorkEvent]]) -> tuple[Port, ...]:
        comm_costs = (event.comm for event in events.value if event.comm is not None)
        return tuple(sorted({port for comm in comm_costs for port, _ in comm.shared}))

    @remembers()
    def _issued_by(
        self, events: ByKey[Sequence[WorkEvent]], devices: tuple[Device, ...]
    ) -> tuple[int, ...]:
        return _issued(events.value, devices)


def _issued(events: Sequence[WorkEvent], devices: tuple[Device, ...]) -> tuple[int, ...]:
    """How long the host of each device issues the events."""
    found = dict.fromkeys(devices, 0)
    for event in events:
        for device in event.devices if event.issue_ticks else ():
            found[device] += event.issue_ticks
    return tuple(found.values())


def woken(now: int, end: int, wake_ticks: int) -> int:
    """The tick at which a device continues that waits from ``now`` for work that ends at ``end``.

    A device polls for as long as waking up takes before it falls asleep. So waking up takes no
    longer than the wait did.
    """
    return end + min(wake_ticks, end - now)


class _Inside:
    """One run in progress; times in the result are relative to ``base``."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        ready: Sequence[int],
        hosts: Sequence[int],
        ports: BusyPorts,
        base: int,
        before: UnderWay,
        wake_ticks: int,
    ) -> None:
        self._devices, self._ports, self._base = devices, ports, base
        self._wake_ticks = wake_ticks
        self._clock = dict(zip(devices, ready, strict=True))
        self._host = dict(zip(devices, hosts, strict=True))
        self._free = {d: base + end for d, end in before.free.items()}
        self._ends = {key: base + end for key, end in before.ends.items()}
        self._spans: list[Span] = []
        self._beside: list[Span] = []

    def run(self, events: Sequence[WorkEvent]) -> StageRun:
        """Run all events, one after another on each device."""
        first, base = len(self._ports.taken), self._base
        for event in events:
            if event.phase is Phase.START:
                self._start(event)
            elif event.phase is Phase.WAIT:
                self._wait(event)
            elif event.comm is None:
                self._compute(event)
            else:
                self._do(event)
        taken = tuple((port, (a - base, b - base)) for port, (a, b) in self._ports.taken[first:])
        ends = tuple(self._clock[device] - base for device in self._devices)
        left = UnderWay(
            {device: end - base for device, end in self._free.items()},
            {key: end - base for key, end in self._ends.items()},
        )
        spans, beside = tuple(self._spans), tuple(self._beside)
        issued = _issued(events, self._devices)
        return StageRun(self._devices, ends, issued, spans, beside, taken, left)

    def _span(self, event: WorkEvent, start: int, end: int) -> None:
        if end > start:
            self._spans.append((event, start - self._base, end - self._base))

    def _compute(self, event: WorkEvent) -> None:
        """Each device computes alone; where its host is late, it waits inside of the event."""
        clock, host = self._clock, self._host
        both: dict[tuple[int, int], list[Device]] = {}
        for device in event.devices:
            start = clock[device]
            clock[device] = max(start + event.ticks, host[device] + event.whole_ticks)
            host[device] += event.issue_ticks
            both.setdefault((start, clock[device]), []).append(device)
        for (start, end), devices in both.items():
            mine = event if len(both) == 1 else replace(event, devices=tuple(devices))
            self._span(mine, start, end)

    def _issue(self, event: WorkEvent) -> int:
        """Issue a call of communication; the tick at which the last host has done so."""
        for device in event.devices:
            self._host[device] += event.issue_ticks
        return max(self._host[device] for device in event.devices)

    def _do(self, event: WorkEvent) -> None:
        if event.comm is not None and not event.is_copy:
            # Calls of a device run one after another, so calls started before come first.
            for device in event.devices:
                self._until(event, device, self._free.get(device, 0))
        start = max(self._issue(event), *(self._clock[device] for device in event.devices))
        end = start + event.ticks
        if event.comm is not None and event.comm.shared:
            end = self._ports.reserve(start, event.ticks, event.comm.shared)
        for device in event.devices:
            late = woken(self._clock[device], start, self._wake_ticks) - start
            self._clock[device] = end + late
        self._span(event, start, end)

    def _start(self, event: WorkEvent) -> None:
        """Start an event in the background.

        Communication runs after all that its devices started before; copies have a port of their
        own.
        """
        free = {} if event.is_copy else self._free
        ready = (max(self._clock[d], free.get(d, 0)) for d in event.devices)
        start = max(self._issue(event), *ready)
        assert event.comm is not None
        end = self._ports.reserve(start, event.ticks, event.comm.shared)
        self._beside.append((event, start - self._base, end - self._base))
        for device in event.devices:
            free[device] = end
            self._ends[event.key, device] = end

    def _wait(self, event: WorkEvent) -> None:
        for device in event.devices:
            self._until(event, device, self._ends.pop((event.key, device), 0))

    def _until(self, event: WorkEvent, device: Device, end: int) -> None:
        """A device waits for background work."""
        now = self._clock[device]
        if end > now:
            assert event.comm is not None
            name, comm = event.name, replace(event.comm, devices=(device,), level_bytes=())
            wait = WorkEvent(name, (device,), end - now, comm, half=event.half, does=event.does)
            self._span(wait, now, end)
            self._clock[device] = woken(now, end, self._wake_ticks)
