"""Binder: makes a function of every instruction of a stage on one device.

The function takes the rank, whose methods do the work, and a ``Frame`` with the values of one run
of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

import rvdcomm as rv
from superscaler_core import ops
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.flow import Held
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import OF_WEIGHTS, Phase, Verb
from superscaler_core.run.frame import Frame
from superscaler_core.run.rank import Rank
from superscaler_core.run.tape import SegmentFunction

Bound = Callable[[Rank, Frame], None]
"""An instruction of one device."""

Index = tuple[slice, ...] | None
"""The part of a tensor that is used; None for all of it."""


class Binder:
    """Binds the instructions of one stage on one device.

    Args:
        made: the plan with its step program.
        stage, device: the stage and the device.
        functions: the functions of the device's segments, by name.
    """

    def __init__(
        self,
        made: Materialized,
        stage: int,
        device: Device,
        functions: Mapping[str, SegmentFunction],
    ) -> None:
        self._made, self._device, self._functions = made, device, functions
        program = made.stages[stage]
        self._flow = program.flow(device) if device in program.steps else None

    @property
    def flow(self) -> Any:
        """The values of the stage on the device."""
        assert self._flow is not None, "it runs segments or moves"
        return self._flow

    def bound(self, instruction: StepInstruction) -> Bound:
        """The function of an instruction."""
        run = _BINDERS[instruction.kind](self, instruction)
        gone = [
            v.key for v in instruction.frees if v.role in _HELD and self._is_here(v, instruction)
        ]
        if not gone:
            return run

        def run_and_free(rank: Rank, frame: Frame) -> None:
            run(rank, frame)
            for key in gone:
                frame.values.pop(key, None)

        return run_and_free

    def _is_here(self, value: Value, instruction: StepInstruction) -> bool:
        return self._device in (value.devices or instruction.devices)

    # --- segments -------------------------------------------------------------------------------

    def forward(self, i: StepInstruction) -> Bound:
        """Run a segment: its arguments are what it reads, in order."""
        function, mine = self._functions[i.name], self.flow.of[i.name]
        call = Rank.forward if i.kind is Verb.FORWARD else Rank.compute
        inputs, others = self._arguments(i)
        results = [value.key for value in i.writes if value.role is Role.RESULT]
        adds = self._added(i)
        losses = [v.key for v in mine.losses] if _has(i.writes, Role.LOSS) else []
        states = {b: v.key for b, v in mine.states.items()} if _has(i.writes, Role.STATE) else {}

        def run(rank: Rank, frame: Frame) -> None:
            values, mb = frame.values, frame.mb
            given = tuple([values[key] for key in inputs])
            made = call(rank, function, mb, given, tuple([get(rank, frame) for get in others]))
            values.update(zip(results, made, strict=True))
            for key in losses:
                rank.add_loss(values[key])
            for buffer, key in states.items():
                rank.keep_state(buffer, values[key])
            for key, edge in adds:
                frame.sums.add(edge, values[key])

        return run

    def hold(self, i: StepInstruction) -> Bound:
        """Keep the arguments of a segment."""
        function = self._functions[i.name]
        inputs, others = self._arguments(i)

        def run(rank: Rank, frame: Frame) -> None:
            given = tuple([frame.values[key] for key in inputs])
            rank.hold(function, frame.mb, given, tuple([get(rank, frame) for get in others]))

        return run

    def _arguments(self, i: StepInstruction) -> tuple[list[str], list[Callable[..., Any]]]:
        """The inputs with gradients, by key, and what gets the others."""
        mine = self.flow.of[i.name]
        num = len(mine.inputs)
        held = {each.value.key: each for each in mine.args}
        given = i.given_reads
        return [v.key for v in given[:num]], [_getter(held[v.key]) for v in given[num:]]

    def _added(self, i: StepInstruction) -> list[tuple[str, str]]:
        """The results that are added to partial sums of edges, each with the edge's name."""
        sums = {value.name for value in i.writes if value.role is Role.PARTIAL}
        return [
            (value.key, edge.name)
            for value in i.writes if value.role is Role.RESULT
            for edge in self.flow.summands.get(Value(value.role, value.name), ())
            if edge.name in sums
        ]  # fmt: skip

    def backward(self, i: StepInstruction) -> Bound:
        """The gradients of a segment's inputs, from those of its results."""
        function, mine = self._functions[i.name], self.flow.of[i.name]
        call = Rank.backward if i.kind is Verb.BACKWARD else Rank.backward_inputs
        losses = frozenset(mine.losses)
        wanted = [
            None if held.value in losses else held.value.key
            for held in mine.results if held.has_grad
        ]  # fmt: skip
        given = [held.value.key for held in mine.inputs]

        def run(rank: Rank, frame: Frame) -> None:
            grads = tuple([rank.loss_grad if k is None else frame.grads.take(k) for k in wanted])
            found = call(rank, function, frame.mb, grads)
            del grads
            for key, grad in zip(given, found, strict=True):
                frame.grads.add(key, grad)

        return run

    def of_segment(self, i: StepInstruction) -> Bound:
        """A call about a segment and a microbatch alone."""
        function, call = self._functions[i.name], getattr(Rank, f"{_prefix(i)}{_CALLS[i.kind]}")
        return lambda rank, frame: call(rank, function, frame.mb)

    # --- spans ----------------------------------------------------------------------------------

    def keep(self, i: StepInstruction) -> Bound:
        """Keep the values that enter a span."""
        keys = [value.key for value in i.given_reads]
        return lambda rank, frame: rank.keep(i.name, frame.mb, tuple(frame.values[k] for k in keys))

    def resume(self, i: StepInstruction) -> Bound:
        """Take the kept values of a span, which is run again."""
        keys = [value.key for value in i.given_writes]

        def run(rank: Rank, frame: Frame) -> None:
            frame.values.update(zip(keys, rank.kept(i.name, frame.mb), strict=True))

        return run

    # --- edges ----------------------------------------------------------------------------------

    def move(self, i: StepInstruction) -> Bound:
        """Move the value of an edge, or start to, or wait for it."""
        edge = self._made.edge(i.name)
        shard, takes = self._shard(edge), self._device in edge.dst.shards
        key = Value(Role.ARRIVED, i.name).key
        return self._moved(i, edge.forward, shard, "move", lambda frame, value: (
            frame.values.__setitem__(key, value) if takes else None
        ))  # fmt: skip

    def move_back(self, i: StepInstruction) -> Bound:
        """Move the gradient of an edge, or start to, or wait for it."""
        edge = self._made.edge(i.name)
        grad, unpack = self._arrived_grad(edge), self._unpacked(edge)
        return self._moved(i, edge.backward, grad, "move_back", unpack)

    def _moved(
        self,
        i: StepInstruction,
        legs: Sequence[Any],
        shard: Callable[[Frame], Any],
        name: str,
        take: Callable[[Frame, Any], None],
    ) -> Bound:
        edge = i.name
        if i.phase is Phase.WAIT:
            wait = getattr(Rank, f"wait_{name}")
            return lambda rank, frame: take(frame, wait(rank, edge))
        if i.phase is Phase.START:
            start = getattr(Rank, f"start_{name}")
            return lambda rank, frame: start(rank, edge, shard(frame))
        move, stays = getattr(Rank, name), len(legs) == 1 and legs[0].is_idle

        def run(rank: Rank, frame: Frame) -> None:
            value = shard(frame)
            take(frame, value if stays and value is not None else move(rank, edge, value))

        return run

    def send(self, i: StepInstruction) -> Bound:
        """Leave a value for its transfer."""
        shard = self._shard(self._made.edge(i.name))
        return lambda rank, frame: rank.send(i.name, frame.mb, shard(frame))

    def receive(self, i: StepInstruction) -> Bound:
        """Take the value of a transfer."""
        key = Value(Role.ARRIVED, i.name).key
        call = Rank.receive if i.kind is Verb.RECEIVE else Rank.recycled

        def run(rank: Rank, frame: Frame) -> None:
            frame.values[key] = call(rank, i.name, frame.mb)

        return run

    def send_back(self, i: StepInstruction) -> Bound:
        """Leave a gradient for its transfer."""
        grad = self._arrived_grad(self._made.edge(i.name))
        return lambda rank, frame: rank.send_grad(i.name, frame.mb, grad(frame))

    def receive_back(self, i: StepInstruction) -> Bound:
        """Take the gradient of a transfer."""
        unpack = self._unpacked(self._made.edge(i.name))
        return lambda rank, frame: unpack(frame, rank.receive_grad(i.name, frame.mb))

    def _shard(self, edge: Edge) -> Callable[[Frame], Tensor | None]:
        """What this device writes to an edge."""
        if self._device not in edge.src.shards:
            return lambda frame: None
        box, sent = edge.src.shards[self._device].box, self.flow.sent[edge]
        combine, name = _combined(box, sent), edge.name

        def shard(frame: Frame) -> Tensor | None:
            total = frame.sums.take(name)
            return combine(frame.values) if total is None else total

        return shard

    def _arrived_grad(self, edge: Edge) -> Callable[[Frame], Tensor | None]:
        """The gradient of what an edge has brought, summed over its readers."""
        key = Value(Role.ARRIVED, edge.name).key
        takes = self._device in edge.dst.shards
        return lambda frame: frame.grads.take(key) if takes else None

    def _unpacked(self, edge: Edge) -> Callable[[Frame, Any], None]:
        """Passes the gradient of a shard on to the values that form the shard."""
        if self._device not in edge.src.shards:
            return lambda frame, grad: None
        box = edge.src.shards[self._device].box
        cuts = [(held.value.key, _index(held.box, box)) for held in self.flow.sent[edge]]

        def unpack(frame: Frame, grad: Any) -> None:
            for key, index in cuts:
                frame.grads.add(key, grad if index is None else grad[index])

        return unpack

    # --- weights --------------------------------------------------------------------------------

    def of_weights(self, i: StepInstruction) -> Bound:
        """A call about the weights that this device reads or stores."""
        call, device = getattr(Rank, f"{_prefix(i)}{_CALLS[i.kind]}"), self._device
        names = [
            use.name
            for use in self._made.uses_of(i)
            if device in use.storage.shards or device in use.side.shards
        ]
        return lambda rank, frame: call(rank, names)

    def update(self, i: StepInstruction) -> Bound:
        """Update the parameters of a stage."""
        tensors, storage = self._made.subject(i), self._made.weights.storage
        if self._made.is_asynchronous:
            every = [tensor.name for tensor in tensors]
            return lambda rank, frame: rank.update(every, keeps=i.keeps)
        names = [t.name for t in tensors if self._device in storage[t].shards]
        return lambda rank, frame: rank.update(names)

    def loss(self, i: StepInstruction) -> Bound:
        """Sum the losses of all microbatches."""
        return lambda rank, frame: rank.total_loss()


_HELD = frozenset({Role.RESULT, Role.ARRIVED})
"""Roles of the values of a frame."""

_CALLS = {
    Verb.RERUN: "rerun",
    Verb.BACKWARD_WEIGHTS: "backward_weights",
    Verb.OUT: "swap_out",
    Verb.IN: "swap_in",
    Verb.FETCH: "fetch",
    Verb.GATHER: "gather",
    Verb.RELEASE: "drop",
    Verb.REDUCE: "reduce",
}
"""Methods of the rank that need no values."""

_BINDERS: Mapping[Verb, Callable[[Binder, StepInstruction], Bound]] = {
    Verb.FORWARD: Binder.forward,
    Verb.COMPUTE: Binder.forward,
    Verb.HOLD: Binder.hold,
    Verb.BACKWARD: Binder.backward,
    Verb.BACKWARD_INPUTS: Binder.backward,
    **dict.fromkeys((Verb.RERUN, Verb.BACKWARD_WEIGHTS, Verb.OUT, Verb.IN), Binder.of_segment),
    Verb.KEEP: Binder.keep,
    Verb.RESUME: Binder.resume,
    Verb.MOVE: Binder.move,
    Verb.MOVE_BACK: Binder.move_back,
    Verb.SEND: Binder.send,
    Verb.RECEIVE: Binder.receive,
    Verb.RECYCLED: Binder.receive,
    Verb.SEND_BACK: Binder.send_back,
    Verb.RECEIVE_BACK: Binder.receive_back,
    **dict.fromkeys(OF_WEIGHTS, Binder.of_weights),
    Verb.UPDATE: Binder.update,
    Verb.LOSS: Binder.loss,
}


def _prefix(instruction: StepInstruction) -> str:
    """The prefix of methods that are one phase of a communication."""
    return f"{instruction.phase}_" if instruction.phase else ""


def _has(values: Sequence[Value], *roles: Role) -> bool:
    return any(value.role in roles for value in values)


def _getter(held: Held) -> Callable[[Rank, Frame], Any]:
    """Gets an argument without gradient."""
    name, key = held.tensor.name, held.value.key
    match held.value.role:
        case Role.INPUT:
            key = held.value.name
            return lambda rank, frame: rank.input(key, frame.mb)
        case Role.CONSTANT:
            return lambda rank, frame: rank.constant(name)
        case Role.STATE:
            return lambda rank, frame: rank.state(name, frame.mb)
        case Role.WEIGHT | Role.COPY:
            use = held.value.name
            return lambda rank, frame: rank.use(use)
    return lambda rank, frame: frame.values[key]


def _index(box: rv.Box, held: rv.Box) -> Index:
    return None if box == held else box.slices_within(held)


def _combined(box: rv.Box, sent: Sequence[Held]) -> Callable[[Mapping[str, Any]], Tensor]:
    """The sum, in a box, of values that each hold a part of it."""
    keys = [held.value.key for held in sent]
    if all(held.box.contains(box) for held in sent):
        cuts = [(held.value.key, _index(box, held.box)) for held in sent]

        def summed(values: Mapping[str, Any]) -> Tensor:
            terms = [values[k] if index is None else values[k][index] for k, index in cuts]
            total: Tensor = terms[0]
            for term in terms[1:]:
                total = total + term
            return total

        return summed
    text, boxes = str(box), [str(held.box) for held in sent]
    return lambda values: ops.join(text, [(values[k], b) for k, b in zip(keys, boxes, strict=True)])
