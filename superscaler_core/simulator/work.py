"""Work: what devices do in a stage and around a step, as times; made once, run many times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.memory.footprint import footprints
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.instruction import COMPUTING, Verb
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.weights import Use
from superscaler_core.simulator.op_time import OpTimes
from superscaler_core.simulator.sums import Sums
from superscaler_core.simulator.wire import Wire, Wires, ticks


@dataclass(frozen=True, slots=True)
class Act:
    """Something that takes time on devices.

    Attributes:
        name: for people.
        devices: that do it together: all begin when the last of them is free.
        ticks: that it takes.
        wire: what it takes of links; None if it computes.
        fetch, ahead: copies from the host that it waits for, and that it starts for the next act
            that fetches.
        store: a copy to the host that starts when it ends.
    """

    name: str
    devices: tuple[Device, ...]
    ticks: int
    wire: Wire | None = None
    fetch: Wire | None = None
    ahead: Wire | None = None
    store: Wire | None = None


@dataclass(frozen=True)
class Methods:
    """How tensors move inside stages, weights included, and between stages."""

    intra: str
    inter: str


class Work:
    """Times of all that a plan does.

    Args:
        made: the plan.
        times: of ops.
        wires: of communication.
        methods: of communication.
        master_dtype: of stored parameters, in which gradients are reduced; the model's if None.
    """

    def __init__(
        self,
        made: Materialized,
        times: OpTimes,
        wires: Wires,
        methods: Methods,
        master_dtype: str | None = None,
    ) -> None:
        self._made, self._times, self._wires = made, times, wires
        self._methods, self._master = methods, master_dtype
        self._stages: dict[tuple[str, int, bool], tuple[Act, ...]] = {}
        self._computing: dict[Segment, tuple[float, float]] = {}

    # --- stages ---------------------------------------------------------------------------------

    def stage(self, kind: str, stage: int, *, is_first: bool = False) -> tuple[Act, ...]:
        """What a stage does, in an order that every device keeps.

        Args:
            kind: "F" forward, "B" backward, "f" forward without gradient.
            stage: which.
            is_first: whether a backward is the first of its step: it adds weights' gradients to
                none of other microbatches.
        """
        key = kind, stage, is_first
        if key not in self._stages:
            self._stages[key] = tuple(self._stage(kind, stage, is_first))
        return self._stages[key]

    def _stage(self, run: str, stage: int, is_first: bool) -> Iterable[Act]:
        sums = Sums(self._made, is_first)
        copies = self._copies(stage, run)
        for instruction in self._made.stages[stage].order[run]:
            kind, what = instruction.kind, instruction.what
            if kind in COMPUTING:
                (device,) = instruction.devices
                act = self._segment(device, what, kind)
                if kind is Verb.BACKWARD:
                    secs = sum(map(self._times.sum_secs, sums.of(device, what)))
                    act = replace(act, ticks=act.ticks + ticks(secs))
                yield self._with_copies(act, what, kind, copies)
            elif kind is Verb.MOVE:
                yield from self._each(what.tensor.name, what.forward)
            elif kind is Verb.MOVE_BACK:
                yield from self._each(what.tensor.name, what.backward)
            elif kind is Verb.GATHER:
                yield from self.fetch(self._made.uses_of.get(what, ()))
            elif kind is Verb.REDUCE:
                yield from self.reduce(self._made.uses_of.get(what, ()))

    def _copies(self, stage: int, run: str) -> Mapping[tuple[Device, Segment], Wire]:
        """What swapped segments copy to the host, or back, in the order in which they run."""
        return {
            (i.devices[0], i.what): self._parcel(stage, i.devices[0], i.what)
            for i in self._made.stages[stage].order[run]
            if i.kind in (Verb.FORWARD, Verb.BACKWARD) and i.what.swap
        }

    def _segment(self, device: Device, segment: Segment, kind: Verb) -> Act:
        if segment not in self._computing:
            self._computing[segment] = self._secs(segment)
        forward, backward = self._computing[segment]
        is_back = kind is Verb.BACKWARD
        secs = backward + (forward if segment.recompute else 0.0) if is_back else forward
        name = segment.parts[0].op.module or segment.parts[0].op.kind
        return Act(name, (device,), ticks(secs + self._times.profile.segment_secs))

    def _secs(self, segment: Segment) -> tuple[float, float]:
        """What computing takes in the forward, and in the backward alone."""
        alone = (part for part in segment.parts if part not in segment.products)
        forward = sum(map(self._times.forward_secs, alone))
        return forward, sum(map(self._times.backward_secs, segment.parts))

    def _with_copies(
        self, act: Act, segment: Segment, kind: Verb, copies: Mapping[tuple[Device, Segment], Wire]
    ) -> Act:
        """What a swapped segment keeps goes to the host, and comes back an act ahead."""
        (device,) = act.devices
        if (device, segment) not in copies:
            return act
        copy = copies[device, segment]
        if kind is Verb.FORWARD:
            return replace(act, store=copy)
        mine = [pair for pair in copies if pair[0] == device]
        after = mine[mine.index((device, segment)) + 1 :]
        return replace(act, fetch=copy, ahead=copies[after[0]] if after else None)

    def _parcel(self, stage: int, device: Device, segment: Segment) -> Wire:
        """The copy of what a segment keeps for its backward."""
        forward = footprints(self._made, device, self._master)["F", stage]
        speed = self._times.profile.host_bytes_per_sec
        return self._wires.copy(device, forward.parcel_bytes[segment.name], speed)

    # --- weights --------------------------------------------------------------------------------

    def fetch(self, uses: Iterable[Use]) -> Iterable[Act]:
        """Weights go to where they are read, those on the host to the device first."""
        chosen = list(uses)
        yield from self._host_copies("from host", chosen, None)
        yield from self._together("weights", [leg for use in chosen for leg in use.fetch])

    def reduce(self, uses: Iterable[Use]) -> Iterable[Act]:
        """Gradients go to where weights are stored, at last to the host where they are there."""
        chosen = [use for use in uses if use.reduce]
        dtype = self._master
        legs = [replace(leg, dtype=dtype or leg.dtype) for use in chosen for leg in use.reduce]
        yield from self._together("gradients", legs)
        yield from self._host_copies("to host", chosen, dtype)

    def _host_copies(self, name: str, uses: Iterable[Use], dtype: str | None) -> Iterable[Act]:
        """Every device copies what it stores of weights on the host, all in one call."""
        sizes: dict[Device, int] = {}
        for use in uses:
            if use.tensor.name in self._made.plan.on_host:
                item_bytes = ITEM_BYTES[dtype or use.tensor.dtype]
                for device, shard in use.storage.shards.items():
                    size = shard.box.num_elements * item_bytes
                    sizes[device] = sizes.get(device, 0) + size
        for device, size in sorted(sizes.items()):
            wire = self._wires.copy(device, size, self._times.profile.host_bytes_per_sec)
            yield Act(name, (device,), wire.ticks, wire)

    @cached_property
    def begin(self) -> tuple[Act, ...]:
        """What a step does first."""
        return tuple(self.fetch(use for use in self._made.weights.uses if not use.is_fetched))

    @cached_property
    def end(self) -> tuple[Act, ...]:
        """What a step does last, but for the optimizer."""
        uses = [use for use in self._made.weights.uses if use.window is None]
        return (*self.reduce(uses), *self._each("loss", self._made.loss))

    # --- communication --------------------------------------------------------------------------

    def carry(self, edge: Edge, is_back: bool) -> Sequence[Wire]:
        """An edge between stages: what moves by itself, leg by leg."""
        legs = edge.backward if is_back else edge.forward
        return [self._wires.of([leg], self._methods.inter) for leg in legs if not leg.is_idle]

    def _each(self, name: str, legs: Iterable[Transfer]) -> Iterable[Act]:
        """Calls one after another."""
        for leg in legs:
            if not leg.is_idle:
                yield self._call(name, self._wires.of([leg], self._methods.intra))

    def _together(self, name: str, legs: Iterable[Transfer]) -> Iterable[Act]:
        """A call for all that have the same devices, in the order of these."""
        groups: dict[tuple[Device, ...], list[Transfer]] = {}
        for leg in legs:
            if not leg.is_idle:
                groups.setdefault(leg.devices, []).append(leg)
        for _, mine in sorted(groups.items()):
            yield self._call(name, self._wires.of(mine, self._methods.intra))

    def _call(self, name: str, wire: Wire) -> Act:
        return Act(name, wire.devices, wire.ticks + ticks(self._times.profile.move_secs), wire)
