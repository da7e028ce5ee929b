"""Work: what devices do in a stage and around a step, as times; made once, run many times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from superscaler_core.codegen.segments import Segment, Step, stage_steps
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sequence import Close, Move, Open
from superscaler_core.materialize.side import Device
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.materialize.weights import Use
from superscaler_core.part import Part
from superscaler_core.simulator.op_time import OpTimes
from superscaler_core.simulator.sums import Sums
from superscaler_core.simulator.wire import Wire, Wires, ticks
from superscaler_core.tensor import ITEM_BYTES
from superscaler_core.validate.footprint import footprints

BIASED = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Kinds of products that add a bias in the same call."""


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

    def _stage(self, kind: str, stage: int, is_first: bool) -> Iterable[Act]:
        sums = Sums(self._made, is_first)
        steps = list(self._in_order(stage, is_back=kind == "B"))
        swapped = [(d, step) for d, step, _ in steps if isinstance(step, Segment) and step.swap]
        copies = {pair: self._parcel(stage, *pair) for pair in swapped if kind != "f"}
        for device, step, is_again in steps:
            way = "F" if is_again else kind
            if is_again and isinstance(step, Segment) and step.is_left_out:
                continue
            if isinstance(step, Segment):
                act = self._segment(device, step, way)
                if way == "B":
                    secs = sum(map(self._times.sum_secs, sums.of(device, step)))
                    act = replace(act, ticks=act.ticks + ticks(secs))
                yield self._with_copies(act, step, way, copies)
            elif isinstance(step, Move):
                edge = step.edge
                legs = edge.backward if way == "B" else edge.forward
                yield from self._each(edge.tensor.name, legs)
            elif isinstance(step, Open | Close):
                yield from self._window(step, way)

    def _in_order(self, stage: int, is_back: bool) -> Iterable[tuple[Device, Step, bool]]:
        """The steps of all devices, those of communication once; and whether they run again."""
        each = {
            device: self._one_way(stage, mine, is_back)
            for device, mine in stage_steps(self._made, stage).items()
        }
        left = {device: mine[::-1] for device, mine in each.items()}
        taking_part: dict[tuple[Step, bool], list[Device]] = {}
        for device, mine in each.items():
            for pair in mine:
                if not isinstance(pair[0], Segment):
                    taking_part.setdefault(pair, []).append(device)
        for wanted in self._one_way(stage, self._made.items[stage], is_back):
            devices = taking_part.get(wanted, [])
            for device in devices:
                while (pair := left[device].pop()) != wanted:
                    yield device, *pair
            if devices:
                yield devices[0], *wanted
        for device, rest in left.items():
            yield from ((device, *pair) for pair in reversed(rest))

    def _one_way(self, stage: int, steps: Sequence[Step], is_back: bool) -> list[tuple[Step, bool]]:
        """Steps in the order run: a backward begins every span by running it forward again."""
        if not is_back:
            return [(step, False) for step in steps]
        spans = self._made.spans[stage]
        runs = groupby(steps, lambda s: s.span if isinstance(s, Segment) else spans.get(s, 0))
        found: list[tuple[Step, bool]] = []
        for span, run in [(span, list(run)) for span, run in runs][::-1]:
            found += [(step, True) for step in run] if span else []
            found += [(step, False) for step in run[::-1]]
        return found

    def _segment(self, device: Device, segment: Segment, kind: str) -> Act:
        if segment not in self._computing:
            self._computing[segment] = self._secs(segment)
        forward, backward = self._computing[segment]
        secs = forward if kind != "B" else backward + (forward if segment.recompute else 0.0)
        call_secs = self._times.profile.segment_secs
        if kind == "B" and not any(
            view.tensor.requires_grad for part in segment.parts for view in part.outputs
        ):
            secs = call_secs = 0.0
        name = segment.parts[0].op.module or segment.parts[0].op.kind
        return Act(name, (device,), ticks(secs + call_secs))

    def _secs(self, segment: Segment) -> tuple[float, float]:
        """What computing takes in the forward, and in the backward alone."""
        fused = self._fused(segment)
        forward = sum(self._times.forward_secs(p) for p in segment.parts if p not in fused)
        return forward, sum(map(self._times.backward_secs, segment.parts))

    def _with_copies(
        self, act: Act, segment: Segment, kind: str, copies: Mapping[tuple[Device, Segment], Wire]
    ) -> Act:
        """What a swapped segment keeps goes to the host, and comes back an act ahead."""
        (device,) = act.devices
        if (device, segment) not in copies:
            return act
        copy = copies[device, segment]
        if kind == "F":
            return replace(act, store=copy)
        mine = [pair for pair in copies if pair[0] == device]
        after = mine[mine.index((device, segment)) + 1 :]
        return replace(act, fetch=copy, ahead=copies[after[0]] if after else None)

    def _parcel(self, stage: int, device: Device, segment: Segment) -> Wire:
        """The copy of what a segment keeps for its backward."""
        forward = footprints(self._made, device, self._master)["F", stage]
        speed = self._times.profile.host_bytes_per_sec
        return self._wires.copy(device, forward.parcel_bytes[segment.name], speed)

    def _fused(self, segment: Segment) -> frozenset[Part]:
        """Parts that add a bias to a product, which makes the sum itself."""
        graph = self._made.plan.graph
        made = {(part.op, part.outputs[0].box): part for part in segment.parts}
        found = set()
        for part in segment.parts:
            op = graph.producer.get(part.op.inputs[0]) if part.op.kind == "add_bias" else None
            product = made.get((op, part.inputs[0].box)) if op is not None else None
            if product is None or product.op.kind not in BIASED or product.outputs[0].summand:
                continue
            if len(graph.readers[product.op.outputs[0]]) == 1:
                found.add(part)
        return frozenset(found)

    def _window(self, step: Open | Close, kind: str) -> Iterable[Act]:
        uses = self._made.uses_of.get(step.window, ())
        begins = isinstance(step, Open) == (kind != "B")
        if begins and step.window.gathers:
            yield from self.fetch(uses)
        if isinstance(step, Open) and kind == "B":
            yield from self.reduce(uses)

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
