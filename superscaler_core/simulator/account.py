"""Account: how the time and the memory of a simulated step are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rvdcomm.units import secs_text
from superscaler_core.compiled import Compiled
from superscaler_core.cost.comm_cost import TICKS_PER_SEC
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.plan import Device
from superscaler_core.simulator.live import Series, live_of, peaks_of
from superscaler_core.simulator.stage_run import StageRun
from superscaler_core.simulator.timeline import StepTimeline


@dataclass(frozen=True)
class LevelUse:
    """Communication whose highest port is on one level of the topology.

    Attributes:
        name: the level: "rank" is inside hosts, "host" between hosts, "host memory" between a
            device and its own host's memory.
        sent_bytes: bytes sent by all devices in a step.
        secs: time of a device in this communication, averaged over the devices.
        exposed_secs: the part of that time in which the device does nothing else.
    """

    name: str
    sent_bytes: int
    secs: float
    exposed_secs: float


PARTS = ("compute", "communication", "bubble")
"""Parts of a step's time; communication counts only where computation does not hide it."""


@dataclass(frozen=True)
class Breakdown:
    """Where the time and the memory of a step go.

    Attributes:
        shares: shares of the step, mean of the devices, by part (``PARTS``).
        levels: bytes sent and mean seconds in communication, by level of the topology.
        memory: bytes on the fullest device, by kind.
    """

    shares: Mapping[str, float]
    levels: Mapping[str, tuple[int, float]]
    memory: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Account:
    """The figures of one simulated training step.

    Times are per device. Compute, exposed communication and bubble add up to ``secs``.

    Attributes:
        title: the program and the device.
        timeline: every run and P2P send.
        level_names: levels of the topology, innermost first.
        compiled: the program.
        profile: profile of every device.
        optimizer_secs: time of the optimizer, included in ``secs``.
        assumptions: what the figures assume, one per line.
    """

    title: str
    timeline: StepTimeline
    level_names: tuple[str, ...]
    compiled: Compiled = field(repr=False)
    profile: DeviceProfile = field(repr=False)
    optimizer_secs: Mapping[Device, float]
    assumptions: tuple[str, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the plan."""
        return self.timeline.devices

    @property
    def memory_bytes(self) -> int:
        """Memory of a device."""
        return self.profile.memory_bytes

    @property
    def secs(self) -> float:
        """Time from the step's start until the last device has updated its weights."""
        return self.timeline.makespan / TICKS_PER_SEC

    @property
    def headline(self) -> str:
        """The program, the device, and the time of a step."""
        return f"{self.title}: {secs_text(self.secs)} a step"

    # --- where the time goes --------------------------------------------------------------------

    @cached_property
    def compute_secs(self) -> Mapping[Device, float]:
        """Time of forward, backward, recomputation and the optimizer."""
        return _in_secs(self._computing)

    @cached_property
    def communication_secs(self) -> Mapping[Device, float]:
        """Time in which a device only communicates, or waits for data under way."""
        return _in_secs(self._communicating)

    @cached_property
    def busy_secs(self) -> Mapping[Device, float]:
        """Time in which a device computes or communicates."""
        return _in_secs(self._busy)

    @cached_property
    def bubble_secs(self) -> Mapping[Device, float]:
        """Time in which a device does neither, because it waits for others."""
        return _in_secs({d: self.timeline.makespan - busy for d, busy in self._busy.items()})

    @property
    def bubble_of_makespan(self) -> float:
        """Bubble divided by the step's time, summed over all devices.

        Source: as ``schedules.Timeline.bubble_of_makespan``.
        """
        return sum(self.bubble_secs.values()) / (self.secs * len(self.devices))

    @property
    def bubble_of_ideal(self) -> float:
        """Bubble divided by the devices' busy time, summed over all devices: may be above 1.

        Source: as ``schedules.Timeline.bubble_of_ideal``.
        """
        return sum(self.bubble_secs.values()) / sum(self.busy_secs.values())

    @property
    def bubble_of_span(self) -> float:
        """``1 - most busy time / longest span``, for the runs of stages only.

        Source: as ``schedules.Timeline.bubble_of_span``.
        """
        first: dict[Device, int] = {}
        last: dict[Device, int] = {}
        outside: Counter[Device] = Counter()
        for ran in self.timeline.runs:
            inside = ran.inside
            for device, end in zip(inside.devices, inside.ends, strict=True):
                if ran.event.stage >= 0:
                    first.setdefault(device, ran.start)
                    last[device] = ran.start + end
                else:
                    outside[device] += inside.busy[device]
        longest = max(last[device] - first[device] for device in last)
        most = max(self._busy[device] - outside[device] for device in last)
        return 1 - most / longest

    # --- communication --------------------------------------------------------------------------

    @property
    def overlap(self) -> float:
        """Share of communication time that is hidden behind computing; 1 if there is none."""
        total = sum(level.secs for level in self.levels)
        exposed = sum(level.exposed_secs for level in self.levels)
        return 1.0 if total == 0 else 1 - exposed / total

    @cached_property
    def levels(self) -> tuple[LevelUse, ...]:
        """Communication by level, innermost first."""
        total = Counter(self.timeline.calls)
        sent: Counter[int] = Counter()
        for inside, count in self._insides:
            for level, num_bytes in inside.sent.items():
                sent[level] += count * num_bytes
            for key, ticks in inside.traffic.items():
                total[key] += count * ticks
        for send in self.timeline.sends:
            for level, num_bytes in enumerate(send.comm.level_bytes):
                sent[level] += num_bytes
            for device in send.comm.devices:
                total[device, send.comm.level] += send.end - send.start
        scale = TICKS_PER_SEC * len(self.devices)
        return tuple(
            LevelUse(
                name,
                sent[i],
                sum(t for (_, level), t in total.items() if level == i) / scale,
                sum(t for (_, level), t in self._exposed.items() if level == i) / scale,
            )
            for i, name in enumerate(self.level_names)
        )

    # --- ticks ----------------------------------------------------------------------------------

    @cached_property
    def _computing(self) -> dict[Device, int]:
        found = dict.fromkeys(self.devices, 0)
        for inside, count in self._insides:
            for device, ticks in inside.computing.items():
                found[device] += count * ticks
        return found

    @cached_property
    def _communicating(self) -> dict[Device, int]:
        found = dict.fromkeys(self.devices, 0)
        for (device, _), ticks in self._exposed.items():
            found[device] += ticks
        return found

    @cached_property
    def _busy(self) -> dict[Device, int]:
        return {d: self._computing[d] + self._communicating[d] for d in self.devices}

    @cached_property
    def _exposed(self) -> Counter[tuple[Device, int]]:
        """Ticks in which devices only communicate, by device and level."""
        found = self.timeline.calls + self.timeline.waits
        for inside, count in self._insides:
            for key, ticks in inside.communicating.items():
                found[key] += count * ticks
        return found

    @cached_property
    def _insides(self) -> list[tuple[StageRun, int]]:
        """The distinct runs, and how often each occurs."""
        counts = Counter(id(ran.inside) for ran in self.timeline.runs)
        distinct = {id(ran.inside): ran.inside for ran in self.timeline.runs}
        return [(inside, counts[key]) for key, inside in distinct.items()]

    # --- memory ---------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> Mapping[Device, Mapping[str, int]]:
        """The peak, by device and kind.

        Kinds: "weights", "gradients", "optimizer", "activations", "buffers", "host".
        """
        return peaks_of(self.compiled)

    @cached_property
    def live(self) -> Mapping[Device, Series]:
        """The bytes of each device over the step."""
        return live_of(self.compiled, self.timeline, self.profile)

    @property
    def peak_bytes(self) -> Mapping[Device, int]:
        """The peak memory of each device."""
        return {
            device: sum(size for kind, size in kinds.items() if kind != "host")
            for device, kinds in self.memory.items()
        }

    @property
    def fits(self) -> bool:
        """Whether every device has the memory that it needs."""
        return max(self.peak_bytes.values()) <= self.memory_bytes

    # --- all of it ------------------------------------------------------------------------------

    @property
    def breakdown(self) -> Breakdown:
        """Where the time and the memory of the step go."""
        times = (self.compute_secs, self.communication_secs, self.bubble_secs)
        shares = (sum(by.values()) / len(by) / self.secs for by in times)
        fullest = max(self.compiled.memory.values(), key=lambda memory: memory.total_bytes)
        return Breakdown(
            dict(zip(PARTS, shares, strict=True)),
            {level.name: (level.sent_bytes, level.secs) for level in self.levels},
            dict(fullest.by_kind),
        )


def _in_secs(ticks: Mapping[Device, int]) -> dict[Device, float]:
    return {device: count / TICKS_PER_SEC for device, count in ticks.items()}
