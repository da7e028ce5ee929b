"""Operands: which values an instruction reads, writes and frees, by its kind.

An instruction names the values of others; what only it makes or takes, such as what a segment
keeps for its backward, follows from its kind and name (``OWN``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.flow import DeviceFlow, Signature, copy_of, grad_of, partial_of
from superscaler_core.materialize.halves import reads_weights_late
from superscaler_core.materialize.weights import Use
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import Verb
from superscaler_core.schedules import ActionKind

FORWARDS = frozenset({ActionKind.FORWARD, ActionKind.RECYCLE})
"""Runs of a stage that are no recomputation, and no backward."""

_COPIES = frozenset({Role.COPY, Role.WEIGHT})


@dataclass(frozen=True, slots=True)
class Operands:
    """The values that an instruction reads and writes, besides its own (``OWN``)."""

    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()


class SegmentOperands:
    """The operands of the segments of a stage on a device, and on devices that do the same.

    Args:
        flow: the values of the stage on the device.
    """

    def __init__(self, flow: DeviceFlow) -> None:
        self.flow = flow
        self._segments = {segment.name: segment for segment in flow.segments}

    def of(
        self, kind: Verb, name: str, run: ActionKind, devices: tuple[Device, ...]
    ) -> StepInstruction:
        """The instruction by which each of these devices runs a segment, in a run of the stage."""
        return instruction_of(kind, name, devices, self._of(kind, name, run))

    def _of(self, kind: Verb, name: str, run: ActionKind) -> Operands:
        # The loss counts in the forward that is trained, and buffers change in all passes; a
        # backward that repeats a forward changes neither.
        mine = self.flow.of[name]
        args = tuple(held.value for held in mine.args)
        weights = tuple(value for value in args if value.role in _COPIES)
        match kind:
            case Verb.FORWARD | Verb.COMPUTE:
                more = [Value(Role.STATE, buffer) for buffer in mine.states]
                more = more if run in FORWARDS else []
                if mine.losses and run is ActionKind.FORWARD:
                    more.append(Value(Role.LOSS, "loss"))
                again = 0 if run in FORWARDS else self._segments[name].region
                sums = (e for held in mine.results for e in self.flow.sums(held.value, again))
                partials = dict.fromkeys(map(partial_of, sums))
                results = (held.value for held in mine.results)
                return Operands(args, (*results, *partials, *more))
            case Verb.HOLD:
                return Operands(args)
            case Verb.RECOMPUTE:
                return Operands(weights)
            case Verb.BACKWARD:
                return Operands(self._entering(mine) + weights, self._given(mine, name, sums=True))
            case Verb.BACKWARD_INPUTS:
                return Operands(self._entering(mine) + weights, self._given(mine, name, sums=False))
            case Verb.BACKWARD_WEIGHTS:
                is_late = reads_weights_late(self._segments[name])
                return Operands(weights if is_late else (), _sums(mine))
        return Operands()

    def _entering(self, mine: Signature) -> tuple[Value, ...]:
        """What readers have added to the gradients of a segment's results."""
        grads = self.flow.grads
        return tuple(g for held in mine.results for g in grads.get(held.value, ()))

    def _given(self, mine: Signature, name: str, *, sums: bool) -> tuple[Value, ...]:
        """What a backward adds to the gradients of a segment's inputs and weights."""
        own = tuple(grad_of(held.value, name) for held in mine.inputs)
        return own + (_sums(mine) if sums else ())


def _sums(mine: Signature) -> tuple[Value, ...]:
    return tuple(Value(Role.SUM, use) for use in mine.trained)


Flows = Mapping[DeviceFlow, Sequence[Device]]
"""The devices of an instruction, together where they pass the same values."""


def moved(edge: Edge, flows: Flows, again: int) -> Operands:
    """The operands of the move of an edge's value inside a stage, or in the recomputation of a
    region.
    """
    everyone = _devices(flows)
    there = edge.dst.shards.keys() & everyone
    arrived = Value(Role.ARRIVED, edge.name).on(there, everyone)
    return Operands(sent(edge, flows, again), (arrived,) if there else ())


def moved_back(edge: Edge, flows: Flows) -> Operands:
    """The operands of the move of its gradient."""
    return Operands(arriving_grads(edge, flows), sent_grads(edge, flows))


def sent(edge: Edge, flows: Flows, again: int = 0) -> tuple[Value, ...]:
    """The values that devices write to an edge, in a forward or when a region is recomputed."""
    return _joined(flows, lambda flow: flow.packed(edge, again))


def sent_grads(edge: Edge, flows: Flows) -> tuple[Value, ...]:
    """What an edge adds to the gradients of the values that it moves."""
    name = edge.name
    return _joined(flows, lambda flow: (grad_of(h.value, name) for h in flow.sent.get(edge, ())))


def arriving_grads(edge: Edge, flows: Flows) -> tuple[Value, ...]:
    """What readers have added to the gradient of what an edge brings."""
    value = Value(Role.ARRIVED, edge.name)
    return _joined(flows, lambda flow: flow.grads.get(value, ()))


def entering_region(region: int, flows: Flows) -> tuple[Value, ...]:
    """The values that a region keeps for its recomputation."""
    return _joined(flows, lambda flow: (held.value for held in flow.entering(region)))


def _joined(flows: Flows, values_of: Callable[[DeviceFlow], Iterable[Value]]) -> tuple[Value, ...]:
    """The values of several devices; each names its devices unless it is on all of them."""
    found: dict[Value, list[Device]] = {}
    for flow, devices in flows.items():
        for value in values_of(flow):
            found.setdefault(value, []).extend(devices)
    everyone = _devices(flows)
    return tuple(value.on(mine, everyone) for value, mine in found.items())


def _devices(flows: Flows) -> Sequence[Device]:
    return [device for devices in flows.values() for device in devices]


# --- weights ------------------------------------------------------------------------------------


def copies(uses: Iterable[Use], devices: Collection[Device]) -> tuple[Value, ...]:
    """The copies of weights that a step fetches or gathers, and drops."""
    named = ((copy_of(use), use.sharding.shards.keys()) for use in uses)
    return tuple(v.on(there & set(devices), devices) for v, there in named if v.role is Role.COPY)


def sums(
    uses: Iterable[Use],
    trained_on: Mapping[str, Collection[Device]],
    devices: Collection[Device],
) -> tuple[Value, ...]:
    """The gradients of copies of weights, on the devices whose backwards make them.

    Args:
        uses: the uses of the weights.
        trained_on: by a use's name, the devices whose segments add to its gradient.
        devices: the devices of the instruction.
    """
    mine = set(devices)
    named = ((use.name, mine.intersection(trained_on.get(use.name, ()))) for use in uses)
    return tuple(Value(Role.SUM, name).on(there, devices) for name, there in named if there)


def stored(uses: Iterable[Use], devices: Collection[Device]) -> tuple[Value, ...]:
    """The gradients of parameters where they are stored."""
    there = {use.tensor.name: use.storage.shards.keys() for use in uses if use.reduce}
    return tuple(Value(Role.STORED, name).on(mine, devices) for name, mine in there.items())


# --- instructions -------------------------------------------------------------------------------


def instruction_of(
    kind: Verb, name: str, devices: tuple[Device, ...], given: Operands, **more: Any
) -> StepInstruction:
    """An instruction with all its operands; what it frees in its block is found by ``freed``."""
    bare = StepInstruction(kind, name, devices, **more)
    return bare.with_values(given.reads, given.writes)
