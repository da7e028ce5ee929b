"""Materialized: a plan with all its communication decided; code is generated from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from superscaler_core.graph.graph import Op
from superscaler_core.graph.once import known_of
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.known import Known
from superscaler_core.materialize.buckets import Bucket, ends, fetched, reduced
from superscaler_core.materialize.edges import Edge, Edges, find_edges, output_sharding
from superscaler_core.materialize.ends import with_ends
from superscaler_core.materialize.events import schedule_of, step_events
from superscaler_core.materialize.flow import Sources
from superscaler_core.materialize.operands import Operands, copies, instruction_of, stored, sums
from superscaler_core.materialize.routes import by_routes, on_its_route
from superscaler_core.materialize.segments import Segment, stage_of_segment
from superscaler_core.materialize.sequence import Close, Item, Open
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.materialize.stage_program import StageProgram
from superscaler_core.materialize.stages import StageParts, placed, stage_program
from superscaler_core.materialize.state import with_state
from superscaler_core.materialize.transfer import Transfer, transfers
from superscaler_core.materialize.updates import (
    borrowed_of,
    borrowers_of,
    trained_in,
    update_blocks,
    updates_at_end,
)
from superscaler_core.materialize.weights import Use, Weights, find_weights
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.savings import FsdpUnit
from superscaler_core.program.bound import check_bound
from superscaler_core.program.duplex import both_halves
from superscaler_core.program.event import Event, P2PSend, actions_in, stage_of_weights
from superscaler_core.program.freed import freed
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.rewrites import rewritten
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import (
    BETWEEN,
    COMPUTING,
    MOVES,
    OF_WEIGHTS,
    OFFLOADS,
    Phase,
    Verb,
)
from superscaler_core.schedules import Action, ActionKind, WeightRule


@dataclass(frozen=True, eq=False)
class Materialized:
    """A validated plan with the communication that it needs.

    Attributes:
        plan: the sProgram's decisions, with one copy of every stage per route (``by_routes``).
        edges: the edges of activations.
        weights: where parameters are stored and used.
        placed: for each stage, what it does in its forward.
        scheduled: the events of a step, in one order for all devices, as the schedule has them.
        topology: the topology that communication is planned for; one host if None.
        decided: the plan as the sProgram left it; None if it is the same as ``plan``.
        given: the step program, if it is not the one that the plan's decisions ask for.
    """

    plan: Plan
    edges: Edges
    weights: Weights
    placed: tuple[StageParts, ...]
    scheduled: tuple[Event, ...]
    topology: rv.Topology | None = None
    decided: Plan | None = None
    given: StepProgram | None = None

    @cached_property
    def known(self) -> Known[Hashable, Any]:
        """What readers have found about the plan, by what they were asked; equal plans share it."""
        if self.given is not None or self.decided is None:
            return Known(MAX_RESULTS)
        of_plans = known_of(self.decided.graph, "results of plans", MAX_RESULTS)
        key = self.decided.key, self.topology
        found: Known[Hashable, Any] = of_plans.of(key, lambda: Known(MAX_RESULTS))
        return found

    def with_program(self, program: StepProgram) -> Materialized:
        """The plan with another step program: one that was rewritten, or read from a text.

        Raises:
            PlanError: the program cannot run, or is not of this plan.
        """
        program.check()
        check_bound(program, self.step_program)
        return replace(self, given=program)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of a step, in one order for all devices."""
        if self.pairs or self.given is not None:
            return self.step_program.events
        return tuple(both_halves(self.scheduled)) if self.plan.overlap.duplex else self.scheduled

    @cached_property
    def pairs(self) -> tuple[tuple[Action, Action], ...]:
        """The schedule's pairs, if they are to run as one."""
        plan, given = self.plan, set(self.scheduled)
        if plan.schedule is None or not plan.overlap.pairs:
            return ()
        pairs = (
            (on_its_route(plan, first), on_its_route(plan, then))
            for first, then in sorted(plan.schedule.pairs)
        )
        return tuple(pair for pair in pairs if given.issuperset(pair))

    def microbatches_of(self, run: Action) -> range:
        """The microbatches of a step that a run of a stage is for: one, or two halves."""
        num_halves = self.plan.overlap.num_halves
        return range(run.microbatch * num_halves, (run.microbatch + 1) * num_halves)

    @cached_property
    def loss(self) -> tuple[Transfer, ...]:
        """The transfers that bring the loss to all devices, once a step."""
        graph = self.plan.graph
        # Copies of the model compute losses of different microbatches; these are summed.
        ends = [output_sharding(self.plan, graph.producer[loss], 0) for loss in graph.losses]
        everyone = self._everyone(graph.loss)
        return transfers(Sharding.joined(ends), everyone, graph.loss.shape, graph.loss.dtype)

    @cached_property
    def whole(self) -> Mapping[PTensor, tuple[Transfer, ...]]:
        """For each parameter, the transfers that bring all of it to all devices, to save it."""
        return {
            tensor: transfers(storage, self._everyone(tensor), tensor.shape, tensor.dtype)
            for tensor, storage in self.weights.storage.items()
        }

    @cached_property
    def states(self) -> Mapping[PTensor, tuple[Transfer, ...]]:
        """For each buffer that changes, the transfers that bring it to all devices, to save it."""
        graph = self.plan.graph
        return {
            buffer: transfers(
                output_sharding(self.plan, graph.producer[kept], 0), self._everyone(buffer),
                buffer.shape, buffer.dtype,
            )
            for buffer, kept in graph.state.items()
        }  # fmt: skip

    def _everyone(self, tensor: PTensor) -> Sharding:
        return Sharding.everyone(self.plan.devices, tensor.shape)

    def plan_communication(self) -> None:
        """Find all communication, so that an impossible plan is refused now."""
        for edge in self.edges.all:
            _ = edge.forward, edge.backward
        for use in self.weights.uses:
            _ = use.fetch, use.reduce
        _ = self.loss, self.whole, self.states, self._updates

    @property
    def items(self) -> tuple[tuple[Item, ...], ...]:
        """For each stage, the items of its forward, in one order for all devices."""
        return tuple(here.items for here in self.placed)

    @cached_property
    def stages(self) -> tuple[StageProgram, ...]:
        """For each stage, its forward and backward, written out."""
        found = []
        for stage, (here, kinds) in enumerate(zip(self.placed, self.stage_kinds, strict=True)):
            units = {
                item: tuple(sorted(self.unit_devices(item.unit)))
                for item in here.items if isinstance(item, Open | Close)
            } if self.plan.fsdp_units else {}  # fmt: skip
            made = stage_program(here, self.sources, stage, units, self.segment_ends, kinds)
            found.append(made)
        return tuple(found)

    @cached_property
    def stage_kinds(self) -> tuple[frozenset[ActionKind], ...]:
        """For each stage, the kinds of actions that the schedule has for it."""
        kinds: list[set[ActionKind]] = [set() for _ in self.placed]
        for event in self.scheduled:
            if isinstance(event, Action):
                kinds[event.stage].add(event.kind)
        return tuple(map(frozenset, kinds))

    @cached_property
    def segment_ends(self) -> frozenset[Op]:
        """The ops before which segments end although there is no communication."""
        return ends(self.plan, self.weights)

    @cached_property
    def step_program(self) -> StepProgram:
        """The whole step as a value, with the overlap that the plan asks for."""
        if self.given is not None:
            return self.given
        is_rewritten = bool(self.plan.overlap) or self.plan.offloads
        blocks = {
            (stage, run): block
            for stage, program in enumerate(self.stages)
            for run, block in (program.order if is_rewritten else program.whole).items()
        }
        blocks |= {(stage, ActionKind.UPDATE): block for stage, block in self._updates.items()}
        overlap, devices = self.plan.overlap, tuple(sorted(self.plan.devices))
        name, num_routes = self.plan.graph.name, self.plan.num_routes
        num_microbatches = schedule_of(self.plan).num_microbatches
        given = blocks, self.scheduled, *self._around, num_microbatches, num_routes
        versions, borrowed = self._versions, self.borrowed
        program = StepProgram(name, devices, *given, versions=versions, borrowed=borrowed)
        if is_rewritten:
            program = rewritten(program, overlap, self.pairs, self._bytes_of)
            program = freed(with_ends(program, self.stages))
        return program

    def _bytes_of(self, instruction: StepInstruction) -> int:
        """The bytes of weights that a communication brings to a device, at most."""
        return sum(use.most_bytes for use in self.uses_of(instruction))

    @cached_property
    def _around(self) -> tuple[Block, Block]:
        """The instructions before all stages and after them, without overlap."""
        begin = tuple(instruction for _, instruction in self._fetches)
        everyone = tuple(sorted(self.plan.devices))
        has_loss = frozenset[Device]().union(*(program.with_loss for program in self.stages))
        share = Value(Role.LOSS, "loss").on(has_loss, everyone)
        loss = instruction_of(Verb.LOSS, "loss", everyone, Operands((share,)))
        if self.is_asynchronous:
            return begin, (loss,)
        end = (instruction for _, instruction in self._reductions)
        return begin, (*end, loss, *updates_at_end(self.weights, self.trained, self._grads_of))

    @cached_property
    def _fetches(self) -> Sequence[tuple[Bucket, StepInstruction]]:
        """The buckets that are fetched for the whole step, each with its instruction."""
        return [
            (bucket, instruction_of(
                Verb.FETCH, bucket.name, bucket.devices,
                Operands((), copies(bucket.uses, bucket.devices)),
            ))
            for bucket in fetched(self.plan, self.weights, self.segment_ends)
        ]  # fmt: skip

    @cached_property
    def _reductions(self) -> Sequence[tuple[Bucket, StepInstruction]]:
        """The buckets of gradients outside FSDP units, each with its instruction."""
        found = []
        for bucket in reduced(self.plan, self.weights, self.segment_ends):
            devices, uses = bucket.devices, bucket.uses
            given = Operands(self._sums(uses, devices), stored(uses, devices))
            found.append((bucket, instruction_of(Verb.REDUCE, bucket.name, devices, given)))
        return found

    def _sums(self, uses: Collection[Use], devices: Collection[Device]) -> tuple[Value, ...]:
        """The gradients of copies of weights, on the devices whose backwards make them."""
        return sums(uses, self._trained_on, devices)

    @cached_property
    def _trained_on(self) -> Mapping[str, frozenset[Device]]:
        """The devices whose segments add to the gradient of a use of a weight, by its name."""
        found: dict[str, frozenset[Device]] = {}
        for program in self.stages:
            for use, devices in program.trained_on.items():
                found[use] = found.get(use, frozenset()) | devices
        return found

    @cached_property
    def trained(self) -> Mapping[int, Sequence[PTensor]]:
        """The parameters that each stage updates."""
        return trained_in(self.plan, self.weights)

    def _grads_of(
        self, tensors: Collection[PTensor], devices: Collection[Device]
    ) -> tuple[Value, ...]:
        """The gradients that an update of parameters reads."""
        mine, reduced = set(tensors), self._reduced_uses
        uses = [use for use in self.weights.uses if use.tensor in mine and use.is_trained]
        here = [use for use in uses if use not in reduced]
        there = stored([use for use in uses if use in reduced], devices)
        return (*self._sums(here, devices), *there)

    @cached_property
    def _reduced_uses(self) -> frozenset[Use]:
        """The uses whose gradients an instruction reduces."""
        buckets = (use for bucket, _ in self._reductions for use in bucket.uses)
        units = (use for use in self.weights.uses if use.unit is not None)
        return frozenset((*buckets, *units))

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether stages update their weights between microbatches."""
        return any(ActionKind.UPDATE in kinds for kinds in self.stage_kinds)

    @property
    def has_one_version(self) -> bool:
        """Whether stages keep only the newest version of weights, which all backwards read."""
        schedule = self.plan.schedule
        return schedule is not None and schedule.weights is WeightRule.NEWEST

    @cached_property
    def delays(self) -> Mapping[str, float]:
        """For each trained parameter, the delay of its gradients, counted in updates.

        Empty if all weights are updated after the step.

        A use of a borrowed weight has, under its own name, the delay of the stage that borrows it.
        """
        if not self.is_asynchronous or self.plan.schedule is None:
            return {}
        delays = self.plan.schedule.delays
        return {
            tensor.name: float(delays[stage])
            for stage in self._updates
            for tensor in self.updated_in(stage)
        } | {
            use.name: float(delays[stage]) for stage, uses in self.borrowers.items() for use in uses
        }

    def updated_in(self, stage: int) -> tuple[PTensor, ...]:
        """The parameters that an update of a stage between microbatches changes."""
        has_update = any(i.kind is Verb.UPDATE for i in self._updates[stage])
        return tuple(self.trained.get(stage, ())) if has_update else ()

    @cached_property
    def _updates(self) -> Mapping[int, Block]:
        """For each stage, the instructions of an update between microbatches."""
        if not self.is_asynchronous:
            return {}
        given = self._fetches, self._reductions, self.trained, self._grads_of
        return update_blocks(self.plan, self.weights, *given)

    @cached_property
    def _versions(self) -> Mapping[Action, int]:
        """The versions above 0 that actions read or make."""
        if not self.is_asynchronous or self.plan.schedule is None:
            return {}
        versions = self.plan.schedule.versions.items()
        return {action: v for action, v in versions if v and self.updated_in(action.stage)}

    @cached_property
    def borrowers(self) -> Mapping[int, tuple[Use, ...]]:
        """For each stage of an asynchronous plan, the uses of weights that it borrows."""
        return borrowers_of(self.plan, self.weights) if self.is_asynchronous else {}

    @cached_property
    def borrowed(self) -> Mapping[tuple[Action, int], int]:
        """For each action and each stage that it borrows weights of, the version that it reads."""
        schedule = self.plan.schedule
        return {} if schedule is None else borrowed_of(schedule, self.scheduled, self.borrowers)

    def block(self, stage: int, run: ActionKind) -> Block:
        """The instructions of all devices in a run of a stage."""
        return self.step_program.blocks[stage, run]

    @cached_property
    def counts(self) -> Counter[tuple[Verb, Any]]:
        """How often each instruction of a stage runs in a step, by kind and subject; no updates."""
        found: Counter[tuple[Verb, Any]] = Counter()
        for event in self.scheduled:
            if isinstance(event, Action):
                for instruction in self.block(event.stage, event.kind):
                    is_counted = instruction.kind is not Verb.UPDATE
                    is_counted &= instruction.phase is not Phase.WAIT
                    if is_counted and instruction.is_for(event.microbatch):
                        found[instruction.kind, self.subject(instruction)] += 1
        return found

    @cached_property
    def stage_devices(self) -> tuple[frozenset[Device], ...]:
        """For each stage, the devices that run its parts or store weights of its FSDP units."""
        found = []
        for stage, items in zip(self.plan.stages, self.items, strict=True):
            devices = {d for op in stage.ops for d in self.plan.op_split(op).devices}
            for item in items if self.plan.fsdp_units else ():
                if isinstance(item, Open):
                    devices |= self.unit_devices(item.unit)
            found.append(frozenset(devices))
        return tuple(found)

    # --- what instructions name -----------------------------------------------------------------

    def subject(self, instruction: StepInstruction) -> Any:
        """What an instruction names: an edge, an FSDP unit, a bucket, or parameters.

        Of segments the one of its first device.
        """
        kind, name = instruction.kind, instruction.name
        if kind in COMPUTING or kind in OFFLOADS or kind is Verb.HOLD:
            return self.segment(name, instruction.devices[0])
        if kind in MOVES or kind in BETWEEN:
            return self.edge(name)
        if kind in OF_WEIGHTS:
            return self._named[name]
        return self.trained[stage_of_weights(name)] if kind is Verb.UPDATE else name

    def segment(self, name: str, device: Device) -> Segment:
        """A segment of a device, by its name."""
        return self.stages[stage_of_segment(name)].steps.segment(name, device)

    def edge(self, name: str) -> Edge:
        """An edge, by its name."""
        return self._edge_of[name]

    @cached_property
    def _edge_of(self) -> Mapping[str, Edge]:
        return {edge.name: edge for edge in self.edges.all}

    @cached_property
    def _named(self) -> Mapping[str, FsdpUnit | Bucket]:
        """The FSDP units and buckets, by name."""
        buckets = {b.name: b for b, _ in (*self._fetches, *self._reductions)}
        return buckets | {f"w{i}": unit for i, unit in enumerate(self.plan.fsdp_units)}

    def is_of_bucket(self, instruction: StepInstruction) -> bool:
        """Whether an instruction fetches or reduces a bucket of weights outside FSDP units."""
        is_of_weights = instruction.kind in OF_WEIGHTS
        return is_of_weights and isinstance(self._named[instruction.name], Bucket)

    def uses_of(self, instruction: StepInstruction) -> tuple[Use, ...]:
        """The uses of weights in the FSDP unit or bucket of an instruction."""
        return self.uses_in(self._named[instruction.name])

    def uses_in(self, what: FsdpUnit | Bucket) -> tuple[Use, ...]:
        """The uses of weights in one FSDP unit or bucket."""
        return what.uses if isinstance(what, Bucket) else self.weights.of_unit.get(what, ())

    def unit_devices(self, unit: FsdpUnit) -> frozenset[Device]:
        """The devices that store or read the weights of an FSDP unit."""
        uses = self.weights.of_unit.get(unit, ())
        return frozenset(
            d for use in uses for sharding in (use.storage, use.sharding) for d in sharding.shards
        )

    @cached_property
    def sources(self) -> Sources:
        """Where parts read their inputs."""
        return Sources(self.plan, self.edges, self.weights)

    def parts_on(self, op: Op, device: Device) -> tuple[Part, ...]:
        """The parts of an op that run on a device."""
        return self.sources.parts_on(op, device)

    @cached_property
    def events_on(self) -> Mapping[Device, tuple[Event, ...]]:
        """For each device, its events of a step."""
        found: dict[Device, list[Event]] = {device: [] for device in self.plan.devices}
        for event in self.events:
            for device in self._taking_part(event):
                found[device].append(event)
        return {device: tuple(events) for device, events in found.items()}

    def _taking_part(self, event: Event) -> Iterable[Device]:
        if isinstance(event, P2PSend):
            return self.edge(event.name).devices
        return {d for run in actions_in(event) for d in self.devices_of(run.stage, run.kind)}

    def devices_of(self, stage: int, run: ActionKind) -> Iterable[Device]:
        """The devices that take part in a run of a stage, or in an update of its weights."""
        if run is not ActionKind.UPDATE:
            return self.stage_devices[stage]
        return {device for instruction in self._updates[stage] for device in instruction.devices}


MAX_RESULTS = 8
"""Bound on plans of a graph whose memory and times are known, and on results about each of them."""


@paused_collector()
def materialize(plan: Plan, topology: rv.Topology | None = None) -> Materialized:
    """Decide all communication of a plan whose parts are complete (see ``check_coverage``).

    Equal plans of one graph share the result while somebody has it.

    Args:
        plan: every part has a device.
        topology: hosts and links that communication is planned for; one host if None.

    Raises:
        OrderError: data dependencies and ``op_order`` form a cycle, or the schedule cannot run.
        PlanError: partial sums on devices do not add up to a value, or groups to recompute overlap.
    """
    known = plan.graph.known.setdefault("materialized", WeakValueDictionary())
    key = plan.key, topology
    found: Materialized | None = known.get(key)
    if found is None:
        # Whoever has the plan may change it.
        found = known[key] = _materialized(plan.with_splits({}), topology)
    return found


def _materialized(plan: Plan, topology: rv.Topology | None) -> Materialized:
    routed = by_routes(with_state(plan))
    edges = find_edges(routed)
    stages = tuple(placed(routed, stage, edges) for stage in routed.stages)
    hides = routed.overlap.pairs and edges.move_inside_stages
    weights = find_weights(routed, edges)
    events = step_events(routed, edges, pairs_are_one=hides)
    made = Materialized(routed, edges, weights, stages, events, topology, plan)
    made.plan_communication()
    return made
