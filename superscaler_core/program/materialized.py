"""Materialized: a plan with all its communication decided; code is generated from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.savings import Window
from superscaler_core.program.buckets import Bucket, ends, fetched, reduced
from superscaler_core.program.duplex import both_halves, duplex
from superscaler_core.program.edges import Edge, Edges, find_edges, output_side
from superscaler_core.program.events import step_events
from superscaler_core.program.instruction import (
    Carry,
    Event,
    Phase,
    StepInstruction,
    Verb,
    actions_in,
)
from superscaler_core.program.overlap import overlap_reductions, prefetch, swap_beside
from superscaler_core.program.overlap_moves import has_moves, overlap_moves
from superscaler_core.program.pairs import weave_pairs
from superscaler_core.program.routes import by_routes, on_its_route
from superscaler_core.program.segments import StageItems, Step
from superscaler_core.program.sequence import Close, Compute, Item, Move, Open, stage_items
from superscaler_core.program.side import Side
from superscaler_core.program.spans import spans_of
from superscaler_core.program.stage_program import StageProgram
from superscaler_core.program.state import with_state
from superscaler_core.program.step_program import Block, StepProgram
from superscaler_core.program.transfer import Transfer, transfers
from superscaler_core.program.updates import (
    borrowed_of,
    borrowers_of,
    update_blocks,
    updates_at_end,
)
from superscaler_core.program.weights import Use, Weights, find_weights
from superscaler_core.schedules import Action, ActionKind, WeightRule


@dataclass(frozen=True, eq=False)
class Materialized:
    """A validated plan with the communication that it needs.

    Attributes:
        plan: the sProgram's decisions, with one copy of every stage per route (``by_routes``).
        edges: the edges of activations.
        weights: where parameters are stored and used.
        items: for each stage, the items of its forward, in one order for all devices.
        scheduled: the events of a step, in one order for all devices, as the schedule has them.
        topology: the topology that communication is planned for; one host if None.
        decided: the plan as the sProgram left it; None if it is the same as ``plan``.
    """

    plan: Plan
    edges: Edges
    weights: Weights
    items: tuple[tuple[Item, ...], ...]
    scheduled: tuple[Event, ...]
    topology: rv.Topology | None = None
    decided: Plan | None = None

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of a step, in one order for all devices."""
        if self.pairs:
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
        ends = [output_side(self.plan, graph.producer[loss], 0) for loss in graph.losses]
        everyone = self._everyone(graph.loss)
        return transfers(Side.joined(ends), everyone, graph.loss.shape, graph.loss.dtype)

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
                output_side(self.plan, graph.producer[kept], 0), self._everyone(buffer),
                buffer.shape, buffer.dtype,
            )
            for buffer, kept in graph.state.items()
        }  # fmt: skip

    def _everyone(self, tensor: PTensor) -> Side:
        return Side.everyone(self.plan.devices, tensor.shape)

    def check(self) -> None:
        """Find all communication and all reruns, so that an impossible plan is refused now."""
        _ = self.spans
        for edge in self.edges.all:
            _ = edge.forward, edge.backward
        for use in self.weights.uses:
            _ = use.fetch, use.reduce
        _ = self.loss, self.whole, self.states, self._updates

    @cached_property
    def spans(self) -> tuple[Mapping[Item, int], ...]:
        """For each stage, the spans that are rerun as a whole: the number of each item's span."""
        return tuple(spans_of(self.plan, items) for items in self.items)

    @cached_property
    def stages(self) -> tuple[StageProgram, ...]:
        """For each stage, its forward and backward, written out."""
        edges = self.edges
        found = []
        for stage, (items, spans) in enumerate(zip(self.items, self.spans, strict=True)):
            taking_part: dict[Step, tuple[Device, ...]] = {
                item: self._devices_of(item) for item in items if not isinstance(item, Compute)
            }
            kinds = self.stage_kinds[stage]
            given = StageItems(
                self.plan, stage, items, spans, taking_part, edges, self.segment_ends, kinds
            )
            found.append(StageProgram(given))
        return tuple(found)

    @cached_property
    def stage_kinds(self) -> tuple[frozenset[ActionKind], ...]:
        """For each stage, the kinds of actions that the schedule has for it."""
        kinds: list[set[ActionKind]] = [set() for _ in self.items]
        for event in self.scheduled:
            if isinstance(event, Action):
                kinds[event.stage].add(event.kind)
        return tuple(map(frozenset, kinds))

    @cached_property
    def segment_ends(self) -> frozenset[Op]:
        """The ops before which segments end although there is no communication."""
        return ends(self.plan, self.weights)

    def _devices_of(self, item: Move | Open | Close) -> tuple[Device, ...]:
        """The devices that take part in a communication."""
        if isinstance(item, Move):
            return item.edge.devices
        return tuple(sorted(self.window_devices(item.window)))

    @cached_property
    def step_program(self) -> StepProgram:
        """The whole step as a value, with the overlap that the plan asks for."""
        blocks = {
            (stage, run): block
            for stage, program in enumerate(self.stages)
            for run, block in program.order.items()
        }
        blocks |= {(stage, ActionKind.UPDATE): block for stage, block in self._updates.items()}
        overlap, devices = self.plan.overlap, tuple(sorted(self.plan.devices))
        name, num_routes = self.plan.graph.name, self.plan.num_routes
        given = blocks, self.scheduled, *self._around, num_routes
        versions, borrowed = self._versions, self.borrowed
        program = StepProgram(name, devices, *given, versions=versions, borrowed=borrowed)
        if overlap.moves:
            program = overlap_moves(program)
        if overlap.duplex:
            program = duplex(program)
        if self.plan.swaps:
            program = swap_beside(program, max(1, overlap.prefetch))
        if overlap.prefetch:
            program = prefetch(program, overlap.prefetch)
        if overlap.reductions:
            program = overlap_reductions(program)
        return weave_pairs(program, self.pairs) if self.pairs else program

    @cached_property
    def _around(self) -> tuple[Block, Block]:
        """The instructions before all stages and after them, without overlap."""
        begin = tuple(
            _of_bucket(Verb.FETCH, bucket)
            for bucket in fetched(self.plan, self.weights, self.segment_ends)
        )
        loss = StepInstruction(Verb.LOSS, "loss", tuple(sorted(self.plan.devices)))
        if self.is_asynchronous:
            return begin, (loss,)
        end = (_of_bucket(Verb.REDUCE, bucket) for bucket in self._reduced)
        return begin, (*end, loss, *updates_at_end(self.plan, self.weights))

    @cached_property
    def _reduced(self) -> tuple[Bucket, ...]:
        return reduced(self.plan, self.weights, self.segment_ends)

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
        return tuple(t for i in self._updates[stage] if i.kind is Verb.UPDATE for t in i.what)

    @cached_property
    def _updates(self) -> Mapping[int, Block]:
        """For each stage, the instructions of an update between microbatches."""
        if not self.is_asynchronous:
            return {}
        return update_blocks(self.plan, self.weights, self._around[0], self._reduced)

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

    @property
    def _is_rewritten(self) -> bool:
        """Whether any rewrite for overlap applies; if not, each stage is written out alone."""
        return bool(self.plan.overlap) or self.plan.swaps

    def block(self, stage: int, run: ActionKind) -> Block:
        """The instructions of all devices in a run of a stage, as in the step program."""
        if self._is_rewritten:
            return self.step_program.blocks[stage, run]
        if run is ActionKind.UPDATE:
            return self._updates[stage]
        return self.stages[stage].order[run]

    @property
    def begin(self) -> Block:
        """The instructions of all devices before all stages, as in the step program."""
        return self.step_program.begin if self._is_rewritten else self._around[0]

    @property
    def end(self) -> Block:
        """The instructions of all devices after all stages, as in the step program."""
        return self.step_program.end if self._is_rewritten else self._around[1]

    @cached_property
    def counts(self) -> Counter[tuple[Verb, Any]]:
        """How often each instruction of a stage runs in a step, by kind and subject."""
        found: Counter[tuple[Verb, Any]] = Counter()
        for event in self.scheduled:
            if isinstance(event, Action):
                for instruction in self.block(event.stage, event.kind):
                    if instruction.phase is not Phase.WAIT and instruction.is_for(event.microbatch):
                        found[instruction.kind, instruction.what] += 1
        return found

    @cached_property
    def stage_devices(self) -> tuple[frozenset[Device], ...]:
        """For each stage, the devices that run its parts or store weights of its windows."""
        found = []
        for stage, items in zip(self.plan.stages, self.items, strict=True):
            devices = {d for op in stage.ops for d in self.plan.op_split(op).devices}
            for item in items if self.plan.windows else ():
                if isinstance(item, Open):
                    devices |= self.window_devices(item.window)
            found.append(frozenset(devices))
        return tuple(found)

    def uses_in(self, what: Window | Bucket) -> tuple[Use, ...]:
        """The uses of weights in one window or bucket."""
        return what.uses if isinstance(what, Bucket) else self.uses_of.get(what, ())

    def window_devices(self, window: Window) -> frozenset[Device]:
        """The devices that store or read the weights of a window."""
        uses = self.uses_of.get(window, ())
        return frozenset(d for use in uses for side in (use.storage, use.side) for d in side.shards)

    def parts_on(self, op: Op, device: Device) -> tuple[Part, ...]:
        """The parts of an op that run on a device."""
        return self._parts_on.get((op.index, device), ())

    @cached_property
    def _parts_on(self) -> Mapping[tuple[int, Device], tuple[Part, ...]]:
        found: dict[tuple[int, Device], tuple[Part, ...]] = {}
        for op in self.plan.graph.ops:
            split = self.plan.op_split(op)
            for part, placed in zip(self.plan.parts(op), split.parts, strict=True):
                if placed.device is not None:
                    key = op.index, placed.device
                    found[key] = (*found.get(key, ()), part)
        return found

    @cached_property
    def events_on(self) -> Mapping[Device, tuple[Event, ...]]:
        """For each device, its events of a step."""
        found: dict[Device, list[Event]] = {device: [] for device in self.plan.devices}
        for event in self.events:
            for device in self._taking_part(event):
                found[device].append(event)
        return {device: tuple(events) for device, events in found.items()}

    def _taking_part(self, event: Event) -> Iterable[Device]:
        if isinstance(event, Carry):
            devices: Iterable[Device] = event.edge.devices
            return devices
        return {d for run in actions_in(event) for d in self.devices_of(run.stage, run.kind)}

    def devices_of(self, stage: int, run: ActionKind) -> Iterable[Device]:
        """The devices that take part in a run of a stage, or in an update of its weights."""
        if run is not ActionKind.UPDATE:
            return self.stage_devices[stage]
        return {device for instruction in self._updates[stage] for device in instruction.devices}

    def crossing_from(self, stage: int) -> tuple[Edge, ...]:
        """The edges from a stage to other stages, and out of the program."""
        return self._crossing[0].get(stage, ())

    def crossing_to(self, stage: int) -> tuple[Edge, ...]:
        """The edges from other stages to a stage."""
        return self._crossing[1].get(stage, ())

    @cached_property
    def _crossing(self) -> tuple[Mapping[int, tuple[Edge, ...]], Mapping[int, tuple[Edge, ...]]]:
        outgoing: dict[int, tuple[Edge, ...]] = {}
        incoming: dict[int, tuple[Edge, ...]] = {}
        for edge in self.edges.all:
            if edge.crosses:
                outgoing[edge.src_stage] = (*outgoing.get(edge.src_stage, ()), edge)
                if not edge.result:
                    incoming[edge.dst_stage] = (*incoming.get(edge.dst_stage, ()), edge)
        return outgoing, incoming

    @cached_property
    def uses_of(self) -> Mapping[Window | None, tuple[Use, ...]]:
        """The uses of weights, by window."""
        found: dict[Window | None, tuple[Use, ...]] = {}
        for use in self.weights.uses:
            found[use.window] = (*found.get(use.window, ()), use)
        return found


@paused_collector()
def materialize(plan: Plan, topology: rv.Topology | None = None) -> Materialized:
    """Decide all communication of a plan whose parts are complete (see ``check_coverage``).

    Args:
        plan: every part has a device.
        topology: hosts and links that communication is planned for; one host if None.

    Raises:
        OrderError: data dependencies and ``op_order`` form a cycle, or the schedule cannot run.
        PlanError: partial sums on devices do not add up to a value, or groups to rerun overlap.
    """
    routed = by_routes(with_state(plan))
    edges = find_edges(routed)
    items = tuple(stage_items(routed, stage, edges) for stage in routed.stages)
    hides = routed.overlap.pairs and has_moves(edges)
    weights = find_weights(routed, edges)
    events = step_events(routed, edges, pairs_are_one=hides)
    made = Materialized(routed, edges, weights, items, events, topology, plan)
    made.check()
    return made


def _of_bucket(kind: Verb, bucket: Bucket) -> StepInstruction:
    return StepInstruction(kind, bucket.name, bucket.devices, what=bucket)
