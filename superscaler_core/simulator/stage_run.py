"""Stage run: simulates the inside of one run of a stage; equal runs are simulated once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from superscaler_core.cost.wire import Port, Wire
from superscaler_core.plan import Device
from superscaler_core.program.verb import Phase
from superscaler_core.simulator.ports import Interval, Ports
from superscaler_core.simulator.work import Act

Span = tuple[Act, int, int]
"""An act with its start and end."""


@dataclass(frozen=True)
class StageRun:
    """The timeline of a run, from tick 0, at which its first device begins.

    Attributes:
        devices: devices that take part.
        ends: when each device is free again.
        spans: every act with its start and end.
        beside: what runs in the background: started communication, and copies to and from the host.
        taken: reserved intervals of ports.
        under_way: background work that the devices have started by the end, even if it has ended.
    """

    devices: tuple[Device, ...]
    ends: tuple[int, ...]
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
        for act, start, end in self.spans:
            if act.wire is None:
                for device in act.devices:
                    found[device] += end - start
        return found

    @cached_property
    def communicating(self) -> dict[tuple[Device, int], int]:
        """Ticks in which each device only communicates or waits for a copy, by level."""
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
        for act, start, end in (*self.spans, *self.beside):
            wire = act.wire
            # A wait itself moves nothing; the communication that it waits for does.
            for device in wire.devices if wire is not None and wire.level_bytes else ():
                assert wire is not None
                key = device, wire.level
                found[key] = found.get(key, 0) + end - start
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
        found: dict[int, int] = {}
        for act, _, _ in (*self.spans, *self.beside):
            for level, count in enumerate(() if act.wire is None else act.wire.level_bytes):
                found[level] = found.get(level, 0) + count
        return found


@dataclass
class UnderWay:
    """Background work that devices have started; each device does it one after another.

    Attributes:
        free: when a device has finished all background work.
        ends: when a device finishes the work started under a key, until it has waited for it.
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
    """Runs acts on devices that become free at given times.

    A run depends on the differences of its devices' start times, on their background work, and on
    the busy times of its shared ports; results are cached by all of these.

    Args:
        ports: busy times of what communication shares.
        wake_ticks: as ``wake_secs`` of ``DeviceProfile``.
        is_memoized: False simulates every run anew; this is slow, and defines the result.
    """

    def __init__(self, ports: Ports, *, wake_ticks: int = 0, is_memoized: bool = True) -> None:
        self._ports, self._wake_ticks, self._is_memoized = ports, wake_ticks, is_memoized
        self._known: dict[tuple[Hashable, ...], StageRun] = {}
        self._shared: dict[int, tuple[Port, ...]] = {}
        self._kept: dict[int, Sequence[Act]] = {}

    def run(
        self,
        acts: Sequence[Act],
        devices: tuple[Device, ...],
        ready: Sequence[int],
        under_way: UnderWay,
    ) -> tuple[int, StageRun]:
        """The tick at which the first device begins, and the run relative to that tick.

        Args:
            acts: in an order that every device keeps; equal runs pass the same object.
            devices: devices that take part.
            ready: when each device is free.
            under_way: background work started before; updated in place.
        """
        base = min(ready)
        before = under_way.since(base, devices)
        run = self._run(acts, devices, ready, base, before)
        under_way.replace(devices, run.under_way, base)
        return base, run

    def _run(
        self,
        acts: Sequence[Act],
        devices: tuple[Device, ...],
        ready: Sequence[int],
        base: int,
        before: UnderWay,
    ) -> StageRun:
        late = tuple(tick - base for tick in ready)
        if not self._is_memoized:
            return run_acts(acts, devices, ready, self._ports, base, before, self._wake_ticks)
        # Acts are compared by identity, so they are kept alive.
        self._kept[id(acts)] = acts
        background = self._ports.background(self._shared_by(acts), base)
        key = id(acts), late, background, before.key
        known = self._known.get(key)
        if known is None:
            ports = Ports(background)
            known = run_acts(acts, devices, late, ports, 0, before, self._wake_ticks)
            self._known[key] = known
        self._ports.replay(known.taken, base)
        return known

    def _shared_by(self, acts: Sequence[Act]) -> tuple[Port, ...]:
        key = id(acts)
        if key not in self._shared:
            wires = (act.wire for act in acts if act.wire is not None)
            ports = {port for wire in wires for port, _ in wire.shared}
            self._shared[key] = tuple(sorted(ports))
        return self._shared[key]


def run_acts(
    acts: Sequence[Act],
    devices: tuple[Device, ...],
    ready: Sequence[int],
    ports: Ports,
    base: int,
    before: UnderWay,
    wake_ticks: int,
) -> StageRun:
    """Run acts; times in the result are relative to ``base``."""
    return _Inside(devices, ready, ports, base, before, wake_ticks).run(acts)


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
        ports: Ports,
        base: int,
        before: UnderWay,
        wake_ticks: int,
    ) -> None:
        self._devices, self._ports, self._base = devices, ports, base
        self._wake_ticks = wake_ticks
        self._clock = dict(zip(devices, ready, strict=True))
        self._free = {d: base + end for d, end in before.free.items()}
        self._ends = {key: base + end for key, end in before.ends.items()}
        self._spans: list[Span] = []
        self._beside: list[Span] = []

    def run(self, acts: Sequence[Act]) -> StageRun:
        """Run all acts, one after another on each device."""
        first, base = len(self._ports.taken), self._base
        for act in acts:
            if act.phase is Phase.START:
                self._start(act)
            elif act.phase is Phase.WAIT:
                self._wait(act)
            elif act.wire is None:
                self._compute(act)
            else:
                self._do(act)
        taken = tuple((port, (a - base, b - base)) for port, (a, b) in self._ports.taken[first:])
        ends = tuple(self._clock[device] - base for device in self._devices)
        left = UnderWay(
            {device: end - base for device, end in self._free.items()},
            {key: end - base for key, end in self._ends.items()},
        )
        spans, beside = tuple(self._spans), tuple(self._beside)
        return StageRun(self._devices, ends, spans, beside, taken, left)

    def _span(self, act: Act, start: int, end: int) -> None:
        if end > start:
            self._spans.append((act, start - self._base, end - self._base))

    def _reserved(self, start: int, num_ticks: int, wire: Wire) -> int:
        """The end of a call that begins at ``start``."""
        return self._ports.reserve(start, num_ticks, wire.shared)

    def _go_beside(self, act: Act, start: int) -> int:
        """Run an act in the background; return its end."""
        assert act.wire is not None
        end = self._reserved(start, act.ticks, act.wire)
        self._beside.append((act, start - self._base, end - self._base))
        return end

    def _compute(self, act: Act) -> None:
        """Run an act on each of its devices as soon as it is free."""
        clock = self._clock
        starts: dict[int, list[Device]] = {}
        for device in act.devices:
            starts.setdefault(clock[device], []).append(device)
            clock[device] += act.ticks
        for start, devices in starts.items():
            mine = act if len(starts) == 1 else replace(act, devices=tuple(devices))
            self._span(mine, start, start + act.ticks)

    def _do(self, act: Act) -> None:
        """Run an act on its devices in the foreground."""
        if act.wire is not None and not act.is_copy:
            # Calls of a device run one after another, so calls started before come first.
            for device in act.devices:
                self._until(act, device, self._free.get(device, 0))
        start = max(self._clock[device] for device in act.devices)
        end = start + act.ticks
        if act.wire is not None and act.wire.shared:
            end = self._reserved(start, act.ticks, act.wire)
        for device in act.devices:
            late = woken(self._clock[device], start, self._wake_ticks) - start
            self._clock[device] = end + late
        self._span(act, start, end)

    def _start(self, act: Act) -> None:
        """Start an act in the background.

        Communication runs after all that its devices started before; copies have a port of their
        own.
        """
        free = {} if act.is_copy else self._free
        start = max(max(self._clock[d], free.get(d, 0)) for d in act.devices)
        end = self._go_beside(act, start)
        for device in act.devices:
            free[device] = end
            self._ends[act.key, device] = end

    def _wait(self, act: Act) -> None:
        for device in act.devices:
            self._until(act, device, self._ends.pop((act.key, device), 0))

    def _until(self, act: Act, device: Device, end: int) -> None:
        """A device waits for background work."""
        now = self._clock[device]
        if end > now:
            assert act.wire is not None
            name, wire = act.name, replace(act.wire, devices=(device,), level_bytes=())
            self._span(Act(name, (device,), end - now, wire, half=act.half), now, end)
            self._clock[device] = woken(now, end, self._wake_ticks)
