"""Work: the events of devices in a stage and around a step, with their durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from superscaler_core.cost.comm_cost import CommCost, CommCosts, ticks
from superscaler_core.cost.issued import Issued
from superscaler_core.cost.op_time import OpTimes, halves
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.graph.graph import Op
from superscaler_core.known import ByKey, Known, remembers
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Segment, stage_of_segment
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.materialize.weights import Use
from superscaler_core.memory.footprint import footprints
from superscaler_core.plan import Device
from superscaler_core.precision import Precision
from superscaler_core.program.event import OverlappedPair, actions_in, pair_of
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import COMPUTING, GOES_BACK, Phase, Verb
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.simulator.sums import Sums

MAX_BLOCKS = 1 << 10
"""Bound on cached blocks of one step; some differ among microbatches."""


@dataclass(frozen=True, slots=True)
class WorkEvent:
    """Something that takes time on devices.

    Attributes:
        name: name for people.
        devices: devices that do it together: all begin when the last of them is free. Each of
            them computes alone, when it is free itself.
        ticks: its duration, if hosts are never late.
        issue_ticks: time in which the host of each device issues it.
        whole_ticks: for computing, as ``Issued.whole``.
        does: the instruction that it carries out; None outside the blocks of stages.
        comm: its load on links; None if it computes.
        is_copy: whether it copies between a device and its host, parallel to all communication.
        phase: for communication: run it, start it in the background, or wait for its end.
        key: identifies a started communication for its wait.
        half: in a pair of actions, the number of the action that it belongs to.
    """

    name: str
    devices: tuple[Device, ...]
    ticks: int
    comm: CommCost | None = None
    is_copy: bool = False
    phase: Phase = Phase.WHOLE
    key: str = ""
    half: int = 0
    issue_ticks: int = 0
    whole_ticks: int = 0
    does: StepInstruction | None = None

    @classmethod
    def computing(
        cls, name: str, devices: tuple[Device, ...], work: Issued, does: StepInstruction
    ) -> WorkEvent:
        """Devices that each compute the same alone."""
        device, host, whole = map(ticks, work)
        # Rounding must not make a host late that began as early as it can.
        whole = min(whole, device + host)
        return cls(name, devices, device, issue_ticks=host, whole_ticks=whole, does=does)


@dataclass(frozen=True, slots=True)
class _Times:
    """The computing of a segment, in seconds: its forward, its backward, each half of that.

    ``split_secs`` is the additional time of two halves compared with a whole backward.
    """

    forward: Issued
    backward: Issued
    inputs: Issued
    weights: Issued
    split_secs: float

    def of(self, kind: Verb) -> Issued:
        """What an instruction kind computes."""
        match kind:
            case Verb.BACKWARD:
                return self.backward
            case Verb.BACKWARD_INPUTS:
                return self.inputs
            case Verb.BACKWARD_WEIGHTS:
                return self.weights.then(Issued.of(self.split_secs))
        return self.forward


@dataclass(frozen=True)
class Methods:
    """The methods by which tensors move inside stages (including weights) and between stages."""

    intra: str
    inter: str


class Work:
    """The durations of everything in a plan.

    Args:
        made: the plan.
        times: times of ops.
        comm_costs: times of communication.
        methods: methods of communication.
        precision: the dtypes of the training.
    """

    def __init__(
        self,
        made: Materialized,
        times: OpTimes,
        comm_costs: CommCosts,
        methods: Methods,
        precision: Precision = Precision(),
    ) -> None:
        self._made, self._times, self._comm_costs = made, times, comm_costs
        self._methods, self._precision = methods, precision
        self._stages: Known[Hashable, Any] = Known(MAX_BLOCKS)
        self._waits: dict[str, CommCost] = {}

    @property
    def profile(self) -> DeviceProfile:
        """The profile of every device."""
        return self._times.profile

    # --- stages ---------------------------------------------------------------------------------

    def stage(self, action: Action, *, is_first: bool = False) -> Sequence[WorkEvent]:
        """The events of a stage in an action, in an order that every device keeps.

        In the first backward of a step, weights' gradients are not added to those of other
        microbatches.
        """
        block = self._made.block(action.stage, action.kind)
        named = {i.microbatch for i in block}
        only = action.microbatch if action.microbatch in named else None
        known, program = self._stages, self._made.stages[action.stage]
        key: tuple[object, ...] = action.kind, action.stage, is_first, only
        if block is program.whole.get(action.kind):
            # Other plans have the same stage.
            known, key = program.known, (*key, *self._asked)

        def find() -> tuple[tuple[WorkEvent, ...], object]:
            mine = [i for i in block if i.is_for(action.microbatch)]
            work_events = tuple(self._work_events(mine, Sums(self._made, is_first), action.stage))
            # The profile is compared by identity, so the entry keeps it alive.
            return work_events, self.profile

        found: tuple[WorkEvent, ...] = known.of(key, find)[0]
        return found

    @cached_property
    def _asked(self) -> tuple[object, ...]:
        """All that the times of a stage depend on besides the stage."""
        profile, topology = id(self.profile), self._comm_costs.topology
        return profile, topology, self._methods, self._precision, self._made.plan.on_host

    def pair(self, event: OverlappedPair, *, is_first: bool = False) -> Sequence[WorkEvent]:
        """The events of two actions that run as one; ``is_first`` is about the backward."""
        mine = tuple(instruction for instruction, _ in self._made.step_program.run_as_one(event))
        return self._pair(ByKey(pair_of(event), event), is_first, mine)

    @remembers()
    def _pair(
        self, event: ByKey[OverlappedPair], is_first: bool, mine: tuple[StepInstruction, ...]
    ) -> Sequence[WorkEvent]:
        actions = actions_in(event.value)
        sums = [Sums(self._made, is_first) for _ in actions]
        return tuple(
            replace(work_event, half=half)
            for instruction in mine
            for half in [instruction.half or 0]
            for work_event in self._work_events([instruction], sums[half], actions[half].stage)
        )

    def _work_events(
        self, block: Sequence[StepInstruction], sums: Sums, stage: int
    ) -> Iterable[WorkEvent]:
        for instruction in block:
            if instruction.kind in COMPUTING:
                for devices in self._alike(stage, instruction.devices):
                    yield self._segment(instruction, devices, sums, stage)
            else:
                yield from self._in_phase(instruction)

    @remembers()
    def _alike(self, stage: int, devices: tuple[Device, ...]) -> Iterable[tuple[Device, ...]]:
        """Devices whose parts of a stage have equal shapes, together."""
        numbers = self._made.stages[stage].shapes
        rows = groupby(sorted(devices, key=numbers.__getitem__), numbers.__getitem__)
        return tuple(tuple(mine) for _, mine in rows)

    def _in_phase(self, instruction: StepInstruction) -> Iterable[WorkEvent]:
        """The events of a communication, or of its start or its wait."""
        phase, key = instruction.phase, _key_of(instruction)
        if phase is Phase.WAIT:
            if key in self._waits:
                comm = self._waits[key]
                yield WorkEvent(
                    f"wait for {key}", instruction.devices, 0, comm, phase=phase, key=key,
                    does=instruction,
                )  # fmt: skip
            return
        for work_event in self._communication(instruction):
            if phase is Phase.START and work_event.comm is not None:
                # A wait itself moves nothing; its level is the highest of the communication it
                # waits for.
                known = self._waits.get(key)
                if known is None or known.level < work_event.comm.level:
                    self._waits[key] = replace(work_event.comm, level_bytes=())
            mine = "" if phase is Phase.WHOLE else key
            yield replace(work_event, phase=phase, key=mine, does=instruction)

    def _communication(self, instruction: StepInstruction) -> Iterable[WorkEvent]:
        kind, what = instruction.kind, self._made.subject(instruction)
        match kind:
            case Verb.MOVE:
                return self._each(what.tensor.name, what.forward)
            case Verb.MOVE_BACK:
                return self._each(what.tensor.name, what.backward)
            case Verb.FETCH | Verb.UNSHARD:
                return self.fetch(self._made.uses_in(what))
            case Verb.REDUCE:
                return self.reduce(self._made.uses_in(what))
            case Verb.LOSS:
                return self._each("loss", self._made.loss)
            case Verb.OFFLOAD | Verb.RELOAD:
                return self._offload(instruction)
        return ()

    def _segment(
        self, instruction: StepInstruction, devices: tuple[Device, ...], sums: Sums, stage: int
    ) -> WorkEvent:
        """An instruction that runs a segment, on devices that take equally long."""
        kind = instruction.kind
        segment = self._made.segment(instruction.name, devices[0])
        times = self._computing(segment)
        work = times.of(kind)
        is_apart = ActionKind.RECOMPUTE in self._made.stage_kinds[stage]
        if kind in GOES_BACK and segment.recompute and not is_apart:
            work = times.forward.then(work)
        work = work.then(Issued.of(self.profile.segment_secs))
        if kind in (Verb.BACKWARD, Verb.BACKWARD_WEIGHTS):
            sizes, issue_secs = sums.of(devices, segment), self.profile.issue_secs
            secs = sum(map(self._times.sum_secs, sizes))
            work = work.then(Issued.of(secs, len(sizes), issue_secs))
        name = segment.parts[0].op.module or segment.parts[0].op.kind
        return WorkEvent.computing(name, devices, work, instruction)

    @remembers()
    def _computing(self, segment: Segment) -> _Times:
        # Devices and layers whose parts have equal forms share these times.
        forms = tuple((part.form, part in segment.products) for part in segment.parts)
        return self._of_forms(ByKey(forms, segment))

    @remembers()
    def _halves(self, ops: tuple[Op, ...]) -> tuple[tuple[float, float], ...]:
        return halves(ops)

    @remembers()
    def _of_forms(self, of: ByKey[Segment]) -> _Times:
        segment, num_split, issue_secs = of.value, 0, self.profile.issue_secs
        forward = backward = inputs = weights = Issued()
        for part in segment.parts:
            if part not in segment.products:
                secs, num = self._times.of(part.form)[0], self._times.launches(part).forward
                forward = forward.then(Issued.of(secs, num, issue_secs))
        shares = self._halves(segment.ops)
        for part, (i_share, w_share) in zip(segment.parts[::-1], shares[::-1], strict=True):
            secs, num = self._times.of(part.form)[1], self._times.launches(part).backward
            back, i_half, w_half = (
                Issued.of(share * secs, share * num, issue_secs) for share in (1, i_share, w_share)
            )
            backward, inputs = backward.then(back), inputs.then(i_half)
            weights = weights.then(w_half)
            num_split += bool(i_share and w_share)
        split_secs = num_split * self.profile.split_secs
        return _Times(forward, backward, inputs, weights, split_secs)

    def _offload(self, instruction: StepInstruction) -> Iterable[WorkEvent]:
        """Copy the kept values of a segment to the host or back."""
        run = ActionKind.FORWARD, stage_of_segment(instruction.name)
        name = "to host" if instruction.kind is Verb.OFFLOAD else "from host"
        for device in instruction.devices:
            forward = footprints(self._made, device, self._precision)[run]
            comm = self._copy(device, forward.offloaded_bytes[instruction.name])
            yield WorkEvent(name, (device,), comm.ticks, comm, is_copy=True)

    def _copy(self, device: Device, num_bytes: int) -> CommCost:
        return self._comm_costs.copy(device, num_bytes, self.profile.host_bytes_per_sec)

    # --- weights --------------------------------------------------------------------------------

    def fetch(self, uses: Iterable[Use]) -> Iterable[WorkEvent]:
        """Fetch weights to their readers; copy those stored on the host to the device first."""
        chosen = list(uses)
        yield from self._host_copies("from host", chosen, Precision())
        yield from self._together(
            "weights", [sub_transfer for use in chosen for sub_transfer in use.fetch]
        )

    def reduce(self, uses: Iterable[Use]) -> Iterable[WorkEvent]:
        """Reduce gradients to where weights are stored; copy them to the host if needed."""
        chosen = [use for use in uses if use.reduce]
        sub_transfers = [
            sub_transfer.of_dtype(self._precision.stored(sub_transfer.dtype))
            for use in chosen
            for sub_transfer in use.reduce
        ]
        yield from self._together("gradients", sub_transfers)
        yield from self._host_copies("to host", chosen, self._precision)

    def _host_copies(
        self, name: str, uses: Iterable[Use], precision: Precision
    ) -> Iterable[WorkEvent]:
        """Copies of the weights that each device stores on the host, in one call per device."""
        sizes: Counter[Device] = Counter()
        for use in uses:
            if use.tensor.name in self._made.plan.on_host:
                item_bytes = precision.item_bytes(use.tensor.dtype)
                for device, shard in use.storage.shards.items():
                    sizes[device] += shard.box.num_elements * item_bytes
        for device, size in sorted(sizes.items()):
            comm = self._copy(device, size)
            yield WorkEvent(name, (device,), comm.ticks, comm)

    @cached_property
    def begin(self) -> tuple[WorkEvent, ...]:
        """The events at the start of a step."""
        alone = [use for use in self._made.weights.uses if not (use.fetch or use.is_fetched)]
        work_events = (
            work_event for i in self._made.step_program.begin for work_event in self._in_phase(i)
        )
        return (*self._host_copies("from host", alone, Precision()), *work_events)

    @cached_property
    def end(self) -> tuple[WorkEvent, ...]:
        """The events at the end of a step, before the optimizer."""
        end = self._made.step_program.end
        reduced = {use for i in end if i.kind is Verb.REDUCE for use in self._made.uses_of(i)}
        uses = [use for use in self._made.weights.uses if use.unit is None and use.reduce]
        alone = [use for use in uses if use not in reduced]
        work_events = (work_event for i in end for work_event in self._in_phase(i))
        return (*work_events, *self._host_copies("to host", alone, self._precision))

    # --- communication --------------------------------------------------------------------------

    @remembers()
    def p2p_send(self, edge: Edge, is_back: bool) -> Sequence[CommCost]:
        """The transfers of an edge between stages, one per sub-transfer."""
        sub_transfers = edge.backward if is_back else edge.forward
        return [
            self._comm_costs.of([sub_transfer], self._methods.inter)
            for sub_transfer in sub_transfers
            if not sub_transfer.is_idle
        ]

    def _each(self, name: str, sub_transfers: Iterable[Transfer]) -> Iterable[WorkEvent]:
        for sub_transfer in sub_transfers:
            if not sub_transfer.is_idle:
                yield self._call(name, self._comm_costs.of([sub_transfer], self._methods.intra))

    def _together(self, name: str, sub_transfers: Iterable[Transfer]) -> Iterable[WorkEvent]:
        """One call for all sub-transfers of the same devices, in their order."""
        groups: dict[tuple[Device, ...], list[Transfer]] = {}
        for sub_transfer in sub_transfers:
            if not sub_transfer.is_idle:
                groups.setdefault(sub_transfer.devices, []).append(sub_transfer)
        for _, mine in sorted(groups.items()):
            yield self._call(name, self._comm_costs.of(mine, self._methods.intra), len(mine))

    def _call(self, name: str, comm: CommCost, num_tensors: int = 1) -> WorkEvent:
        overhead = ticks(num_tensors * self.profile.move_secs)
        issue = ticks(self.profile.call_secs(comm.ring))
        return WorkEvent(name, comm.devices, comm.ticks + overhead, comm, issue_ticks=issue)


def _key_of(instruction: StepInstruction) -> str:
    """The key under which a communication is started and waited for."""
    half = "" if instruction.half is None else f" half {instruction.half}"
    return f"{instruction.kind} {instruction.name}{half}"
