"""Timeline: a training step in time, event by event in the program's order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from superscaler_core.cost.comm_cost import CommCost, ticks
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.routes import home
from superscaler_core.plan import Device
from superscaler_core.program.event import OverlappedPair, P2PSend, actions_in
from superscaler_core.program.verb import Verb
from superscaler_core.schedules import GRADS, Action, ActionKind
from superscaler_core.simulator.busy_ports import BusyPorts
from superscaler_core.simulator.hosts import Hosts
from superscaler_core.simulator.stage_run import StageRun, StageRuns, UnderWay, woken
from superscaler_core.simulator.work import Work, WorkEvent


@dataclass(frozen=True, slots=True)
class Outside:
    """The work of a step before all runs of stages ("begin"), and after them ("end")."""

    kind: str
    stage: int = -1
    microbatch: int = -1


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of a stage, or the work before or after all of them."""

    event: Action | Outside
    start: int
    inside: StageRun


@dataclass(frozen=True, slots=True)
class TimedSend:
    """The transfer of a tensor or gradient to another stage: one call in the background.

    Start and end are ticks from the step's start.
    """

    event: P2PSend
    tensor: str
    comm: CommCost
    start: int
    end: int


@dataclass
class StepTimeline:
    """A whole step, in ticks from its start.

    Attributes:
        devices: the devices of the plan.
        runs: in the program's order.
        sends: in the program's order.
        waits: ticks that each device waits for P2P sends under way, by level.
        waiting: the device, the start and the end of each of these waits.
        calls: ticks that each device takes to start P2P sends, by level.
        starts: intervals in which a device starts a P2P send.
        makespan: when the last device has finished.
    """

    devices: tuple[Device, ...]
    runs: list[Ran] = field(default_factory=list)
    sends: list[TimedSend] = field(default_factory=list)
    waits: Counter[tuple[Device, int]] = field(default_factory=Counter)
    waiting: list[tuple[Device, int, int]] = field(default_factory=list)
    calls: Counter[tuple[Device, int]] = field(default_factory=Counter)
    starts: list[tuple[int, int]] = field(default_factory=list)
    makespan: int = 0


Arrival = tuple[int, int, int]
"""Begin and end of a P2P send for a device, and the highest level that it crosses."""


class Stepper:
    """Steps through the events in time.

    Args:
        made, work: the plan, and the work of devices.
        optimizer_secs: time of the optimizer on every device, at the end.
        is_memoized: as in ``StageRuns``.
        tick: called after every event.
    """

    def __init__(
        self,
        made: Materialized,
        work: Work,
        optimizer_secs: Mapping[Device, float],
        *,
        is_memoized: bool = True,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._made, self._work, self._tick = made, work, tick
        self._optimizer_secs = optimizer_secs
        profile = work.profile
        self._call_ticks = ticks(profile.move_secs + profile.p2p_secs)
        self._wake_ticks = ticks(profile.wake_secs)
        self._ports = BusyPorts()
        self._runs = StageRuns(self._ports, wake_ticks=self._wake_ticks, is_memoized=is_memoized)
        self._clock = dict.fromkeys(made.plan.devices, 0)
        self._hosts = Hosts(made.plan.devices, profile)
        self._mail: dict[tuple[Edge, int, bool], deque[dict[Device, Arrival]]] = {}
        self._updates_of: dict[int, tuple[Sequence[WorkEvent], tuple[Device, ...]]] = {}
        self._begun: set[tuple[int, tuple[Device, ...]]] = set()
        self._under_way = UnderWay()
        self._stage_devices = [tuple(sorted(devices)) for devices in made.stage_devices]
        self.timeline = StepTimeline(made.plan.devices)

    def run(self) -> StepTimeline:
        """Simulate the whole step."""
        everyone = self._made.plan.devices
        self._do(Outside("begin"), self._work.begin, everyone, {}, num_actions=0)
        for event in self._made.events:
            if isinstance(event, P2PSend):
                self._p2p_send(event)
            elif isinstance(event, OverlappedPair):
                self._pair(event)
            else:
                self._work_event(event)
            self._tick()
        last = *self._work.end, *self._updates()
        self._do(Outside("end"), last, everyone, {}, num_actions=0)
        self.timeline.makespan = max(*self._clock.values(), self._hosts.end)
        return self.timeline

    def _work_event(self, event: Action) -> None:
        """Run a stage, or update its weights."""
        if event.kind is not ActionKind.UPDATE:
            work_events = self._work.stage(event, is_first=self._is_first(event))
            self._do(event, work_events, self._stage_devices[event.stage], self._arrivals(event))
            return
        if event.stage not in self._updates_of:
            work_events = (*self._work.stage(event), *self._optimizers(event.stage))
            devices = tuple(sorted(self._made.devices_of(event.stage, event.kind)))
            self._updates_of[event.stage] = work_events, devices
        work_events, devices = self._updates_of[event.stage]
        if devices:
            self._do(event, work_events, devices, {})
        # The next backward is the first one of the next update.
        self._begun.discard((event.stage, self._stage_devices[event.stage]))

    def _pair(self, event: OverlappedPair) -> None:
        """Run the two actions of a pair as one, which waits for the inputs of both."""
        firsts = [self._is_first(run) for run in actions_in(event)]
        devices = {d for run in actions_in(event) for d in self._stage_devices[run.stage]}
        arrivals: dict[Device, Arrival] = {}
        for run in actions_in(event):
            for device, arrival in self._arrivals(run).items():
                arrivals[device] = max(arrival, arrivals.get(device, arrival), key=lambda a: a[1])
        work_events = self._work.pair(event, is_first=any(firsts))
        self._do(event.first, work_events, tuple(sorted(devices)), arrivals, num_actions=2)
        both = self.timeline.runs.pop()
        for half, run in enumerate(actions_in(event)):
            self.timeline.runs.append(Ran(run, both.start, both.inside.of_half(half)))

    def _optimizers(self, stage: int) -> Iterator[WorkEvent]:
        """The optimizer of one stage: its share of the time that each device's weights take."""
        storage = self._made.weights.storage
        mine = self._made.updated_in(stage)
        for device in self._made.plan.devices:
            sizes = {
                tensor: side.num_elements.get(device, 0)
                for tensor, side in storage.items()
                if tensor.requires_grad
            }
            share = sum(sizes[tensor] for tensor in mine)
            if share:
                secs = self._optimizer_secs[device] * share / sum(sizes.values())
                yield WorkEvent("optimizer", (device,), ticks(secs))

    def _is_first(self, event: Action) -> bool:
        """Whether no earlier run on its devices computed its stage's weight gradients."""
        # Copies of a stage on other routes share its weights, and may be on the same devices.
        mine = home(self._made.plan, event.stage), self._stage_devices[event.stage]
        if event.kind not in GRADS or mine in self._begun:
            return False
        self._begun.add(mine)
        return True

    def _updates(self) -> Iterator[WorkEvent]:
        """The updates of a step on every device, all together."""
        updates = (i for i in self._made.step_program.end if i.kind is Verb.UPDATE)
        for device in sorted({device for update in updates for device in update.devices}):
            yield WorkEvent("optimizer", (device,), ticks(self._optimizer_secs[device]))

    def _do(
        self,
        event: Action | Outside,
        work_events: Sequence[WorkEvent],
        devices: tuple[Device, ...],
        arrivals: Mapping[Device, Arrival],
        num_actions: int = 1,
    ) -> None:
        """Run events on devices; each device starts when it is free and its inputs have arrived."""
        ready = []
        for device in devices:
            now = self._clock[device]
            if device in arrivals and arrivals[device][1] > now:
                start, end, level = arrivals[device]
                since = max(now, start)
                self.timeline.waits[device, level] += end - since
                self.timeline.waiting.append((device, since, end))
                now = woken(now, end, self._wake_ticks)
            ready.append(now)
        hosts = self._hosts.begin(devices, ready, num_actions)
        base, inside = self._runs.run(work_events, devices, ready, hosts, self._under_way)
        for device, end, issued in zip(devices, inside.ends, inside.issued, strict=True):
            self._clock[device] = self._hosts.issued(device, issued, base + end)
        self.timeline.runs.append(Ran(event, base, inside))

    # --- between stages -------------------------------------------------------------------------

    def _p2p_send(self, event: P2PSend) -> None:
        """Start a P2P send when all its devices have reached it; the devices continue."""
        edge = self._made.edge(event.name)
        arrived: dict[Device, Arrival] = {}
        for comm in self._work.p2p_send(edge, event.is_back):
            self._call(comm)
            issued = self._hosts.call(comm.devices)
            start = max(issued, *(self._clock[device] for device in comm.devices))
            end = self._ports.reserve(start, comm.ticks, comm.ports)
            self.timeline.sends.append(TimedSend(event, edge.tensor.name, comm, start, end))
            for device in comm.devices:
                before = arrived.get(device)
                if before is None or end > before[1]:
                    arrived[device] = start, end, comm.level
        mail = edge, event.microbatch, event.is_back
        self._mail.setdefault(mail, deque()).append(arrived)

    def _call(self, comm: CommCost) -> None:
        for device in comm.devices if self._call_ticks else ():
            before = self._clock[device]
            self._clock[device] = before + self._call_ticks
            self.timeline.starts.append((before, self._clock[device]))
            self.timeline.calls[device, comm.level] += self._call_ticks

    def _arrivals(self, event: Action) -> Mapping[Device, Arrival]:
        """For each device the last P2P send that a run waits for."""
        if event.kind in (ActionKind.RECOMPUTE, ActionKind.WEIGHTS):
            return {}
        is_back = event.kind.goes_back
        found: dict[Device, Arrival] = {}
        awaited = self._awaited(event.stage, is_back)
        for (edge, ends), mb in product(awaited, self._made.microbatches_of(event)):
            mail = self._mail.get((edge, mb, is_back))
            # The first pass of a recycled value waits for nothing.
            for device, arrival in mail.popleft().items() if mail else ():
                if device in ends and (device not in found or arrival[1] > found[device][1]):
                    found[device] = arrival
        return found

    def _awaited(self, stage: int, is_back: bool) -> Iterable[tuple[Edge, Mapping[Device, object]]]:
        """The edges whose P2P sends a stage waits for, with the devices that wait."""
        if is_back:
            return [(e, e.src.shards) for e in self._made.edges.leaving(stage) if e.backward]
        return [(e, e.dst.shards) for e in self._made.edges.arriving(stage)]
