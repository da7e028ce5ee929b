"""Resimulator: simulates a step again after some ops were split differently.

Results that a change does not affect are reused: edges and weights of other tensors, times of other
runs of ops, and durations of consecutive runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from superscaler_core.compiled import Compiled
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.cost.presets import profile_of
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.wire import TICKS_PER_SEC, Wires, topology_for
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import UPDATE, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.known import Known
from superscaler_core.memory import STATES
from superscaler_core.memory.stored import stored_by_device
from superscaler_core.plan import Device, OpSplit, Plan
from superscaler_core.program.edges import Edge, Edges, edges_beyond, edges_of, stages_by_op
from superscaler_core.program.events import step_events
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.routes import splits_of_copies
from superscaler_core.program.sequence import Item, stage_items
from superscaler_core.program.side import Side
from superscaler_core.program.weights import Use, Weights, uses_of
from superscaler_core.simulator.known_runs import Calls, KnownStepper, StepWork, Times
from superscaler_core.simulator.runs import Cutter, KnownStage, has_runs
from superscaler_core.simulator.simulation import optimizer_secs
from superscaler_core.simulator.work import Methods, Work

MAX_RUNS = 1 << 14
"""Bound on cached runs of ops with their acts; on times of runs and stages; and on calls."""

EDGES_OF_TENSOR = 1 << 16
"""Difference between the first edge numbers of successive tensors. It exceeds the number of edges
of any tensor, so edges keep their order when one tensor gets more or fewer edges."""


class Resimulator:
    """Simulates a plan repeatedly while splits of its ops change.

    Law (tests/superscaler_core/simulator/test_resimulator.py): ``secs`` equals the result of
    ``simulate`` for the plan with these splits, to the picosecond.

    Plans with windows, reruns or swaps, and stages in which several ops read one weight, are
    simulated too; but if such a stage changes, all of it is computed anew.

    Args:
        compiled: the initial program; it is not changed.
        profile: profile of every device, or a preset's name.
        topology: the topology; the one that the program was compiled for if None.
        communication: as in ``simulate``.

    Raises:
        PlanError: as in ``simulate``.
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
        if made.is_asynchronous:
            raise PlanError(
                "the resimulator changes plans that update weights after a step; simulate this one."
            )
        if made.pairs:
            raise PlanError("the resimulator runs pairs one after the other; simulate this one.")
        self._profile = profile_of(profile) if isinstance(profile, str) else profile
        if 0 < self._profile.num_cores < len(made.plan.devices):
            raise PlanError("the resimulator gives every device its core; simulate this plan.")
        self._times = OpTimes(self._profile)
        self._wires = Wires(topology_for(topology or made.topology, made.plan.devices))
        self._methods = Methods(communication, communication)
        self._master, self._num_states = compiled.master_dtype, STATES[compiled.optimizer]
        self._topology = made.topology
        self._cutter = Cutter(lambda part: Work(*self._given(part)), MAX_RUNS)
        self._times_of_runs: Times = Known(MAX_RUNS)
        self._calls: Calls = Known(MAX_RUNS)
        plan = made.plan
        self._stage_of = stages_by_op(plan)
        self._numbers = {tensor: i for i, tensor in enumerate(plan.graph.producer)}
        self._state = self._changed(None, plan, {})
        self.plan = compiled.plan
        """The plan with the present splits."""
        self.secs = self._secs(self._state)
        """Seconds of the step with the present splits."""

    @paused_collector()
    def secs_with(self, splits: Mapping[Op, OpSplit]) -> float:
        """Seconds of the step if these ops were split this way; nothing changes.

        Args:
            splits: splits of ops of the graph, or of ops that update its parameters.

        Raises:
            PlanError: a part is on a device that the plan does not have, or the partial sums on
                devices do not add up to a value.
        """
        return self._secs(self._with(splits)[1])

    @paused_collector()
    def change(self, splits: Mapping[Op, OpSplit]) -> float:
        """Set the splits of these ops; return the seconds of the step."""
        plan, state = self._with(splits)
        self.secs, self.plan, self._state = self._secs(state), plan, state
        return self.secs

    def _with(self, splits: Mapping[Op, OpSplit]) -> tuple[Plan, _State]:
        """The plan with other splits for these ops and their copies, with its derived state."""
        plan, routed = self.plan.with_splits(splits), self._state.plan
        if plan.num_routes == 1:
            return plan, self._changed(self._state, plan, splits)
        ops = {op.name: op for op in (*routed.graph.ops, *routed.graph.updates.values())}
        named = (splits_of_copies(plan, op, split.parts) for op, split in splits.items())
        copies = {ops[name]: split for mine in named for name, split in mine.items()}
        return plan, self._changed(self._state, routed.with_splits(copies), copies)

    # --- effects of a change --------------------------------------------------------------------

    def _changed(self, old: _State | None, plan: Plan, splits: Mapping[Op, OpSplit]) -> _State:
        """The derived state of a plan, given the state before these ops were split differently."""
        graph = plan.graph
        ops = graph.ops if old is None else [op for op in splits if op.kind != UPDATE]
        tensors = dict.fromkeys(t for op in ops for t in (*op.inputs, *op.outputs))
        moved = [tensor for tensor in tensors if tensor in graph.producer]
        edges = {} if old is None else dict(old.edges)
        for tensor in moved:
            first = self._numbers[tensor] * EDGES_OF_TENSOR
            edges[tensor] = edges_of(plan, tensor, self._stage_of, first)
        beyond = () if old is None else old.beyond
        if ops and (graph.recycled or graph.results):
            first = len(self._numbers) * EDGES_OF_TENSOR
            beyond = tuple(edges_beyond(plan, self._stage_of, first))
        deferred = {graph.producer[t]: s for t in self._numbers if (s := edges[t][1]) is not None}
        ordered = (edge for tensor in self._numbers for edge in edges[tensor][0])
        all_edges = Edges.of((*ordered, *beyond), deferred)
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
            self._cutter.stage(made, stage)
            if old is None or stage.index in stages
            else old.stages[stage.index]
            for stage in plan.stages
        )
        return _State(made, edges, beyond, uses, acts)

    def _uses(
        self,
        known: Mapping[PTensor, _Uses],
        plan: Plan,
        deferred: Mapping[Op, Mapping[Device, int]],
        ops: Iterable[Op],
    ) -> dict[PTensor, _Uses]:
        """For each parameter its storage and uses, computed anew for those of these ops."""
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
        events = () if old is None else old.made.scheduled
        crossing = [edge for edge in edges.all if edge.crosses]
        if old is None or crossing != [edge for edge in old.made.edges.all if edge.crosses]:
            events = step_events(plan, edges)
        # Only stages that are built as a whole, and windows, read the items.
        items: tuple[tuple[Item, ...], ...] = ((),) * plan.num_stages
        if not has_runs(plan):
            items = tuple(stage_items(plan, stage, edges) for stage in plan.stages)
        return Materialized(plan, edges, weights, items, events, self._topology)

    # --- time -----------------------------------------------------------------------------------

    def _secs(self, state: _State) -> float:
        work = StepWork(state.stages, self._calls, *self._given(state.made))
        plan, storage = state.plan, state.made.weights.storage
        stored = stored_by_device(storage, plan.on_host, self._master)
        update_secs = optimizer_secs(stored, self._times, self._num_states, plan.devices)
        profile = self._profile
        stepper = KnownStepper(
            state.made, work, update_secs, self._times_of_runs,
            carry_secs=profile.move_secs + profile.carry_secs, wake_secs=profile.wake_secs,
        )  # fmt: skip
        return stepper.run().makespan / TICKS_PER_SEC

    def _given(
        self, made: Materialized
    ) -> tuple[Materialized, OpTimes, Wires, Methods, str | None]:
        """The arguments of ``Work``."""
        return made, self._times, self._wires, self._methods, self._master


_Uses = tuple[Side, tuple[Use, ...]]
"""The storage of a parameter, and its uses."""


@dataclass(frozen=True, eq=False)
class _State:
    """State derived from a plan.

    Attributes:
        made: the plan with its communication.
        edges: the edges of every activation, with gradient shares that may replace them.
        beyond: edges to the next turn and out of the program.
        uses: the storage and the uses of every parameter.
        stages: the acts of the stages.
    """

    made: Materialized
    edges: Mapping[PTensor, tuple[list[Edge], Mapping[Device, int] | None]]
    beyond: tuple[Edge, ...]
    uses: Mapping[PTensor, _Uses]
    stages: tuple[KnownStage, ...]

    @property
    def plan(self) -> Plan:
        """The decisions."""
        return self.made.plan
