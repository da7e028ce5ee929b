"""Resimulator: a step simulated again after some ops were split in another way.

What a change does not reach is remembered: edges and weights of other tensors, the times of other
runs of ops, and how long those take one behind the other.

A stage is cut into *runs* of ops at communication in which all of its devices take part. There all
of them go on at one time, and no segment goes on, so a run is the same whatever is before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import rvdcomm as rv
from superscaler_core.collector import paused_collector
from superscaler_core.compiled import Compiled
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.cost.presets import profile_of
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.wire import TICKS_PER_SEC, Port, Wires, topology_for
from superscaler_core.graph.graph import UPDATE, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.memory import STATES
from superscaler_core.memory.stored import stored_bytes
from superscaler_core.plan import Device, OpSplit, Plan, Stage
from superscaler_core.program.edges import Edge, Edges, edges_of, recycling_edges, stages_by_op
from superscaler_core.program.events import step_events
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.sequence import Compute, Item, Move, moves_before, stage_items
from superscaler_core.program.side import Side
from superscaler_core.program.weights import Use, Weights, uses_of
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.simulator.ports import Background, Interval, Ports
from superscaler_core.simulator.stage_run import StageRun, StageRuns, UnderWay, run_acts
from superscaler_core.simulator.timeline import Stepper
from superscaler_core.simulator.work import Act, Methods, Work

MAX_RUNS = 1 << 14
"""Runs of ops that are remembered, with their acts; and times of such runs and of stages."""

_WHOLE = (ActionKind.TURN, ActionKind.FORWARD, ActionKind.BACKWARD)
"""Runs of a stage of which the runs of its ops are the parts, in order."""

EDGES_OF_TENSOR = 1 << 16
"""More than a tensor has: edges of the next tensor are numbered from here on, so that they keep
their order when one has more or fewer."""


class Resimulator:
    """Simulates a plan again and again while splits of its ops change.

    Law (tests/superscaler_core/simulator/test_resimulator.py): ``secs`` is what ``simulate`` finds
    for the plan with these splits, to the picosecond.

    Plans whose weights come and go, that run groups again or swap them, and stages that read a
    weight in several ops are simulated too; of them a stage that changes is made anew as a whole.

    Args:
        compiled: the program to begin with; it is not changed.
        profile: of every device, or a preset's name.
        topology: what the program was compiled for if None.
        communication: as of ``simulate``.

    Raises:
        PlanError: as of ``simulate``.
    """

    def __init__(
        self,
        compiled: Compiled,
        profile: DeviceProfile | str,
        topology: rv.Topology | None = None,
        *,
        communication: str = "rvd",
    ) -> None:
        made = compiled.materialized
        self._profile = profile_of(profile) if isinstance(profile, str) else profile
        self._times = OpTimes(self._profile)
        self._wires = Wires(topology_for(topology or made.topology, made.plan.devices))
        self._methods = Methods(communication, communication)
        self._master, self._num_states = compiled.master_dtype, STATES[compiled.optimizer]
        self._topology = made.topology
        self._runs: dict[Hashable, _Run] = {}
        self._known: _Known = {}
        plan = made.plan
        self._stage_of = stages_by_op(plan)
        self._numbers = {tensor: i for i, tensor in enumerate(plan.graph.producer)}
        self._state = self._changed(None, plan, {})
        self.secs = self._secs(self._state)
        """Of the step with the splits as they are now."""

    @property
    def plan(self) -> Plan:
        """The plan with the splits as they are now."""
        return self._state.plan

    @paused_collector()
    def secs_with(self, splits: Mapping[Op, OpSplit]) -> float:
        """Seconds of the step if these ops were split so; nothing changes.

        Args:
            splits: of ops of the graph, or of those that update its parameters.

        Raises:
            PlanError: a part is on a device that the plan has not, or devices hold sums that do not
                make a value.
        """
        return self._secs(self._changed(self._state, self.plan.with_splits(splits), splits))

    @paused_collector()
    def change(self, splits: Mapping[Op, OpSplit]) -> float:
        """Let these ops be split so from now on; the seconds of the step."""
        state = self._changed(self._state, self.plan.with_splits(splits), splits)
        self.secs, self._state = self._secs(state), state
        return self.secs

    # --- what a change reaches ------------------------------------------------------------------

    def _changed(self, old: _State | None, plan: Plan, splits: Mapping[Op, OpSplit]) -> _State:
        """What is known of a plan, given what was known before these ops were split so."""
        graph = plan.graph
        ops = graph.ops if old is None else [op for op in splits if op.kind != UPDATE]
        tensors = dict.fromkeys(t for op in ops for t in (*op.inputs, *op.outputs))
        moved = [tensor for tensor in tensors if tensor in graph.producer]
        edges = {} if old is None else dict(old.edges)
        for tensor in moved:
            first = self._numbers[tensor] * EDGES_OF_TENSOR
            edges[tensor] = edges_of(plan, tensor, self._stage_of, first)
        recycling = () if old is None else old.recycling
        if graph.recycled and ops:
            first = len(self._numbers) * EDGES_OF_TENSOR
            recycling = tuple(recycling_edges(plan, self._stage_of, first))
        deferred = {graph.producer[t]: s for t in self._numbers if (s := edges[t][1]) is not None}
        ordered = (edge for tensor in self._numbers for edge in edges[tensor][0])
        all_edges = Edges.of((*ordered, *recycling), deferred)
        reached = {graph.producer[t] for t in moved} | {*ops, *splits}
        uses = self._uses({} if old is None else old.uses, plan, deferred, reached)
        weights = Weights(
            {tensor: storage for tensor, (storage, _) in uses.items()},
            tuple(use for _, mine in uses.values() for use in mine),
        )
        made = self._materialized(plan, all_edges, weights, old)
        reached |= {reader for t in moved for reader, _ in graph.readers.get(t, ())}
        stages = {self._stage_of[op.index] for op in reached if op.kind != UPDATE}
        acts = tuple(
            self._stage(made, stage)
            if old is None or stage.index in stages
            else old.stages[stage.index]
            for stage in plan.stages
        )
        return _State(made, edges, recycling, uses, acts)

    def _uses(
        self,
        known: Mapping[PTensor, _Uses],
        plan: Plan,
        deferred: Mapping[Op, Mapping[Device, int]],
        ops: Iterable[Op],
    ) -> dict[PTensor, _Uses]:
        """By parameter where it is stored and read, anew for those of these ops."""
        window_of = {op: window for window in plan.windows for op in window.ops}
        parameters = plan.graph.parameters
        found = dict(known)
        for tensor in parameters.values() if not known else ():
            found[tensor] = uses_of(plan, deferred, tensor, window_of)
        for tensor in {t for op in ops for t in op.inputs if t.name in parameters} if known else ():
            found[tensor] = uses_of(plan, deferred, tensor, window_of)
        return found

    def _materialized(
        self, plan: Plan, edges: Edges, weights: Weights, old: _State | None
    ) -> Materialized:
        events = () if old is None else old.made.events
        crossing = [edge for edge in edges.all if edge.crosses]
        if old is None or crossing != [edge for edge in old.made.edges.all if edge.crosses]:
            events = step_events(plan, edges)
        # Items are asked for by stages that are made as a whole, and by windows.
        items: tuple[tuple[Item, ...], ...] = ((),) * plan.num_stages
        if not self._has_runs(plan):
            items = tuple(stage_items(plan, stage, edges) for stage in plan.stages)
        return Materialized(plan, edges, weights, items, events, self._topology)

    # --- stages ---------------------------------------------------------------------------------

    def _has_runs(self, plan: Plan) -> bool:
        """Whether stages can be cut in runs of ops, and nothing is under way between these."""
        actions = () if plan.schedule is None else plan.schedule.places
        is_whole = all(action.kind in _WHOLE for action in actions)
        return plan.runs_in_order and not plan.has_orders and not plan.overlap and is_whole

    def _stage(self, made: Materialized, stage: Stage) -> _Stage:
        if not self._has_runs(made.plan):
            return _Stage((_Run(self._work(made)),))
        if self._shares_weights(made, stage):
            items = stage_items(made.plan, stage, made.edges)
            return _Stage((self._run_of(made, stage, items),))
        runs = []
        for key, steps in self._cut(made, stage):
            if key not in self._runs:
                items = tuple(item for step in steps for item in _items_of(made.plan, step))
                _keep(self._runs, key, self._run_of(made, stage, items))
            runs.append(self._runs[key])
        return _Stage(tuple(runs))

    def _run_of(self, made: Materialized, stage: Stage, items: Sequence[Item]) -> _Run:
        """The run of a stage that does these items."""
        alone = tuple(tuple(items) if s is stage else () for s in made.plan.stages)
        edges, weights, events = made.edges, made.weights, made.events
        part = Materialized(made.plan, edges, weights, alone, events, self._topology)
        return _Run(self._work(part))

    def _work(self, made: Materialized) -> Work:
        return Work(made, self._times, self._wires, self._methods, self._master)

    def _shares_weights(self, made: Materialized, stage: Stage) -> bool:
        """Whether several ops of a stage read one weight, so that their gradients are added."""
        read = [t for op in stage.ops for t in op.inputs if t.name in made.plan.graph.parameters]
        return len(set(read)) < len(read)

    def _cut(self, made: Materialized, stage: Stage) -> Iterable[tuple[Hashable, list[Op | Edge]]]:
        """The runs of a stage: what each depends on, and its ops and moves in order."""
        devices = made.stage_devices[stage.index]
        moves = moves_before(made.edges, stage.index)
        runs: list[list[Op | Edge]] = [[]]
        place: dict[Op | Edge, int] = {}
        ordered = [(op.index, op) for op in stage.ops]
        last = [(index, None) for index in moves if index > stage.ops[-1].index]
        for index, op in (*ordered, *last):
            for edge in moves.get(index, ()):
                place[edge] = len(runs) - 1
                runs[-1].append(edge)
                if devices.issubset(edge.devices):
                    runs.append([])
            if op is not None:
                place[op] = len(runs) - 1
                runs[-1].append(op)
        leaving: dict[PTensor, list[Edge]] = {}
        for edge in made.edges.all:
            if edge.src_stage == stage.index:
                leaving.setdefault(edge.tensor, []).append(edge)
        for number, steps in enumerate(runs):
            yield self._key(made, steps, number, place, leaving), steps

    def _key(
        self,
        made: Materialized,
        steps: Sequence[Op | Edge],
        number: int,
        place: Mapping[Op | Edge, int],
        leaving: Mapping[PTensor, Sequence[Edge]],
    ) -> Hashable:
        """What a run depends on: its ops with their splits and what brings their inputs, its moves,
        and who reads elsewhere what it makes.
        """
        of_reader, readers = made.edges.of_reader, made.plan.graph.readers
        found: list[Hashable] = []
        for step in steps:
            found.append(step)
            if isinstance(step, Edge):
                continue
            found.append(made.plan.op_split(step))
            found += [of_reader.get((step, i)) for i in range(len(step.inputs))]
            for tensor in step.outputs:
                found += leaving.get(tensor, ())
                found += [
                    place.get(reader) == number
                    for reader, i in readers.get(tensor, ())
                    if (reader, i) not in of_reader
                ]
                found += [place.get(edge) == number for edge in leaving.get(tensor, ())]
        return tuple(found)

    # --- time -----------------------------------------------------------------------------------

    def _secs(self, state: _State) -> float:
        stepper = _Stepper(
            state.made,
            _StepWork(self._work(state.made), state.stages),
            self._optimizer_secs(state),
            self._profile.move_secs,
            self._known,
        )
        return stepper.run().makespan / TICKS_PER_SEC

    def _optimizer_secs(self, state: _State) -> Mapping[Device, float]:
        plan, hosted = state.plan, state.plan.on_host
        # Most parameters are stored alike.
        alike = Counter(
            (tensor.dtype, tensor.name in hosted, storage)
            for tensor, (storage, _) in state.uses.items()
            if tensor.requires_grad
        )
        sizes = {is_hosted: dict.fromkeys(plan.devices, 0) for is_hosted in (False, True)}
        for (dtype, is_hosted, storage), count in alike.items():
            for device, size in stored_bytes(dtype, storage, self._master).items():
                sizes[is_hosted][device] += count * size
        return {
            device: self._times.update_secs(
                self._num_states, sizes[False][device], sizes[True][device]
            )
            for device in plan.devices
        }


_Uses = tuple[Side, tuple[Use, ...]]
"""Where a parameter is stored, and its uses."""

_Known = dict[Hashable, StageRun]
"""Times of runs of ops and of stages, by their acts and by what was busy when they began."""


@dataclass(frozen=True, eq=False)
class _State:
    """What is known of a plan.

    Attributes:
        made: it, with its communication.
        edges: of every activation, with the shares of its gradient that may spare them.
        recycling: edges to the next turn.
        uses: by parameter.
        stages: their acts.
    """

    made: Materialized
    edges: Mapping[PTensor, tuple[list[Edge], Mapping[Device, int] | None]]
    recycling: tuple[Edge, ...]
    uses: Mapping[PTensor, _Uses]
    stages: tuple[_Stage, ...]

    @property
    def plan(self) -> Plan:
        """The decisions."""
        return self.made.plan


def _items_of(plan: Plan, step: Op | Edge) -> Iterable[Item]:
    if isinstance(step, Edge):
        yield Move(step)
        return
    for part in plan.parts(step):
        device = plan.device(part)
        assert device is not None, f"{part} has no device; validate comes before"
        yield Compute(part, device)


def _keep(known: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Remember something, and forget the oldest of too much."""
    known[key] = value
    if len(known) > MAX_RUNS:
        del known[next(iter(known))]


# --- acts ---------------------------------------------------------------------------------------


class _Acts(Sequence[Act]):
    """Acts of a run of ops, told apart from others by identity."""

    def __init__(self, acts: Sequence[Act]) -> None:
        self._acts = acts
        wires = (act.wire for act in acts if act.wire is not None)
        shared = {port for wire in wires for port, _ in wire.shared}
        self.shared: tuple[Port, ...] = tuple(sorted(shared))

    def __len__(self) -> int:
        return len(self._acts)

    def __getitem__(self, i: Any) -> Any:
        return self._acts[i]


class _StageActs(Sequence[Act]):
    """Acts of a stage: runs of ops one behind the other."""

    def __init__(self, runs: Sequence[_Acts]) -> None:
        self.runs = runs
        self.shared = tuple(sorted({port for acts in runs for port in acts.shared}))

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __getitem__(self, i: Any) -> Any:
        return [act for acts in self.runs for act in acts][i]


class _Run:
    """A run of ops of a stage.

    Args:
        work: of a plan that has nothing but the run.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._found: dict[int, _Acts] = {}

    def acts(self, action: Action, *, is_first: bool) -> _Acts:
        """As of ``Work.stage``."""
        # It keeps its acts, so they are told apart by identity.
        acts = self._work.stage(action, is_first=is_first)
        if id(acts) not in self._found:
            self._found[id(acts)] = _Acts(acts)
        return self._found[id(acts)]


class _Stage:
    """The runs of ops of a stage, in the order of its forward."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = runs
        self._found: dict[tuple[_Acts, ...], _StageActs] = {}

    def acts(self, action: Action, *, is_first: bool) -> _StageActs:
        """As of ``Work.stage``."""
        runs = self._runs[::-1] if action.kind is ActionKind.BACKWARD else self._runs
        acts = tuple(run.acts(action, is_first=is_first) for run in runs)
        if acts not in self._found:
            self._found[acts] = _StageActs(acts)
        return self._found[acts]


class _StepWork:
    """What ``Stepper`` asks of ``Work``, of stages that are known."""

    def __init__(self, work: Work, stages: Sequence[_Stage]) -> None:
        self._work, self._stages = work, stages
        self.begin, self.end, self.carry = work.begin, work.end, work.carry

    def stage(self, action: Action, *, is_first: bool = False) -> Sequence[Act]:
        """As of ``Work.stage``."""
        return self._stages[action.stage].acts(action, is_first=is_first)


# --- time ---------------------------------------------------------------------------------------


class _Stepper(Stepper):
    """Lets time pass, with runs that were simulated before."""

    def __init__(
        self,
        made: Materialized,
        work: _StepWork,
        optimizer_secs: Mapping[Device, float],
        move_secs: float,
        known: _Known,
    ) -> None:
        super().__init__(made, cast(Work, work), optimizer_secs, move_secs=move_secs)
        self._runs = _KnownRuns(self._ports, known)


class _KnownRuns(StageRuns):
    """Runs of stages, each made of runs of ops; equal ones are simulated once, in all steps."""

    def __init__(self, ports: Ports, known: _Known) -> None:
        super().__init__(ports)
        self._in_all_steps = known

    def run(
        self,
        acts: Sequence[Act],
        devices: tuple[Device, ...],
        ready: Sequence[int],
        under_way: UnderWay,
    ) -> tuple[int, StageRun]:
        """As of ``StageRuns``."""
        if isinstance(acts, _StageActs | _Acts):
            return self._remembered(acts, devices, ready, under_way, self._ports)
        return super().run(acts, devices, ready, under_way)

    def _remembered(
        self,
        acts: _StageActs | _Acts,
        devices: tuple[Device, ...],
        ready: Sequence[int],
        under_way: UnderWay,
        ports: Ports,
    ) -> tuple[int, StageRun]:
        base = min(ready)
        late = tuple(tick - base for tick in ready)
        before = under_way.since(base, devices)
        background = ports.background(acts.shared, base) if acts.shared else ()
        key = acts, late, background, before.key
        known = self._in_all_steps.get(key)
        if known is None:
            known = self._find(acts, devices, late, background, before)
            _keep(self._in_all_steps, key, known)
        ports.replay(known.taken, base)
        under_way.replace(devices, known.under_way, base)
        return base, known

    def _find(
        self,
        acts: _StageActs | _Acts,
        devices: tuple[Device, ...],
        late: tuple[int, ...],
        background: Background,
        before: UnderWay,
    ) -> StageRun:
        ports = Ports(background)
        if isinstance(acts, _Acts):
            return run_acts(acts, devices, late, ports, 0, before)
        clock: tuple[int, ...] = late
        taken: list[tuple[Port, Interval]] = []
        for one in acts.runs:
            base, inside = self._remembered(one, devices, clock, before, ports)
            clock = tuple(base + end for end in inside.ends)
            taken += [(port, (base + a, base + b)) for port, (a, b) in inside.taken]
        return StageRun(devices, clock, (), (), tuple(taken), before)
