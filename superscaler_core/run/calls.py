"""Calls: which methods of a rank an instruction calls on one device, and with which values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.flow import DeviceFlow
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import OF_WEIGHTS, Phase, Verb
from superscaler_core.run.lines import (
    Add,
    CallExpression,
    Expression,
    Fixed,
    Function,
    Line,
    Tuple,
    Variable,
    combined,
    part,
)

_GRAD, _SUM, _GRAD_SUM = "g_{}", "{}_sum", "g_{}_sum"
"""Forms of names of variables."""


class Calls:
    """The lines of the instructions of one run of a stage on a device, in the block's order.

    A sum is added up term by term, so that no term is kept: its first term is the sum, the first
    addition makes a new tensor, and all others add to that in place.

    Args:
        made: the plan with its step program.
        device: the device.
        stage: the stage.
    """

    def __init__(self, made: Materialized, device: Device, stage: int) -> None:
        self._made, self._device, self._stage = made, device, stage
        self._grads: dict[Value, Expression] = {}
        self._sums: dict[Value, Expression] = {}

    @cached_property
    def _flow(self) -> DeviceFlow:
        """The values of the stage on the device; there are some if it runs segments or moves."""
        return self._made.stages[self._stage].flow(self._device)

    def lines(self, instruction: StepInstruction) -> Iterator[Line]:
        """The lines of the next instruction of the run."""
        return _LINES[instruction.kind](self, instruction)

    # --- segments -------------------------------------------------------------------------------

    def _forward(self, i: StepInstruction) -> Iterator[Line]:
        mine = self._flow.of[i.name]
        method = "forward" if i.kind is Verb.FORWARD else "compute"
        results = tuple(Variable(held.value) for held in mine.results)
        yield Line(self._with_args(i, method), results, unpacks=True)
        roles = {value.role for value in i.writes}
        for loss in mine.losses if Role.LOSS in roles else ():
            yield Line(CallExpression("add_loss", (Variable(loss),)))
        for buffer, value in mine.states.items() if Role.STATE in roles else ():
            yield Line(CallExpression("keep_state", (buffer, Variable(value))))
        sums = {value.name for value in i.writes if value.role is Role.PARTIAL}
        for variable in results if sums else ():
            for edge in self._flow.summands.get(variable.value, ()):
                if edge.name in sums:
                    yield from _added(self._sums, _sent(edge), _SUM, variable)

    def _hold(self, i: StepInstruction) -> Iterator[Line]:
        yield Line(self._with_args(i, "hold"))

    def _with_args(self, i: StepInstruction, method: str) -> CallExpression:
        """A call with a segment and all its arguments."""
        mine = self._flow.of[i.name]
        inputs = Tuple(tuple(Variable(held.value) for held in mine.inputs))
        others = Tuple(tuple(_argument(held.value) for held in mine.others))
        return CallExpression(method, (Function(i.name), Fixed.MICROBATCH, inputs, others))

    def _backward(self, i: StepInstruction) -> Iterator[Line]:
        mine = self._flow.of[i.name]
        method = "backward" if i.kind is Verb.BACKWARD else "backward_inputs"
        grads = Tuple(tuple(
            Fixed.LOSS_GRAD if held.value in mine.losses else self._grad(held.value)
            for held in mine.results if held.has_grad
        ))  # fmt: skip
        found = {held.value: Variable(held.value, _GRAD, i.name) for held in mine.inputs}
        call = CallExpression(method, (Function(i.name), Fixed.MICROBATCH, grads))
        yield Line(call, tuple(found.values()), unpacks=True)
        for value, grad in found.items():
            yield from _added(self._grads, value, _GRAD_SUM, grad)

    def _of_segment(self, i: StepInstruction) -> Iterator[Line]:
        yield Line(CallExpression(_method(i), (Function(i.name), Fixed.MICROBATCH)))

    def _grad(self, value: Value) -> Expression:
        """The gradient of a value, summed over its readers."""
        return self._grads.get(value, Fixed.NONE)

    # --- regions that are recomputed
    # -------------------------------------------------------------------

    def _keep(self, i: StepInstruction) -> Iterator[Line]:
        yield Line(CallExpression("keep", (i.name, Fixed.MICROBATCH, Tuple(self._entering(i)))))

    def _resume(self, i: StepInstruction) -> Iterator[Line]:
        yield Line(
            CallExpression("kept", (i.name, Fixed.MICROBATCH)), self._entering(i), unpacks=True
        )

    def _entering(self, i: StepInstruction) -> tuple[Variable, ...]:
        region = int(i.name.rpartition("_region")[2])
        return tuple(Variable(held.value) for held in self._flow.entering(region))

    # --- edges ----------------------------------------------------------------------------------

    def _move(self, i: StepInstruction) -> Iterator[Line]:
        edge = self._made.edge(i.name)
        is_read = self._device in edge.dst.shards
        makes = (_arrived(edge),) if is_read and i.phase is not Phase.START else ()
        given = Fixed.NONE if i.phase is Phase.WAIT else self._shard(edge)
        yield _moved(i, "move", edge.forward, given, makes)

    def _move_back(self, i: StepInstruction) -> Iterator[Line]:
        edge = self._made.edge(i.name)
        grad = self._arrived_grad(edge) if self._device in edge.dst.shards else Fixed.NONE
        if i.phase is Phase.START or self._device not in edge.src.shards:
            yield _moved(i, "move_back", edge.backward, grad)
        else:
            shard_grad = Variable(_sent(edge), _GRAD)
            yield _moved(i, "move_back", edge.backward, grad, (shard_grad,))
            yield from self._passed_on(edge, shard_grad)

    def _send(self, i: StepInstruction) -> Iterator[Line]:
        edge = self._made.edge(i.name)
        method = "result" if edge.result else "recycle" if edge.recycles else "send"
        yield Line(CallExpression(method, (i.name, Fixed.MICROBATCH, self._shard(edge))))

    def _receive(self, i: StepInstruction) -> Iterator[Line]:
        method = "receive" if i.kind is Verb.RECEIVE else "recycled"
        makes = (_arrived(self._made.edge(i.name)),)
        yield Line(CallExpression(method, (i.name, Fixed.MICROBATCH)), makes)

    def _send_back(self, i: StepInstruction) -> Iterator[Line]:
        grad = self._arrived_grad(self._made.edge(i.name))
        yield Line(CallExpression("send_grad", (i.name, Fixed.MICROBATCH, grad)))

    def _receive_back(self, i: StepInstruction) -> Iterator[Line]:
        edge = self._made.edge(i.name)
        grad = Variable(_sent(edge), _GRAD)
        yield Line(CallExpression("receive_grad", (i.name, Fixed.MICROBATCH)), (grad,))
        yield from self._passed_on(edge, grad)

    def _shard(self, edge: Edge) -> Expression:
        """What this device writes to an edge; a partial sum is written once."""
        if self._device not in edge.src.shards:
            return Fixed.NONE
        box = edge.src.shards[self._device].box
        return self._sums.pop(_sent(edge), None) or combined(box, self._flow.sent[edge])

    def _arrived_grad(self, edge: Edge) -> Expression:
        return self._grad(_arrived(edge).value)

    def _passed_on(self, edge: Edge, grad: Variable) -> Iterator[Line]:
        """Pass the gradient of a shard on to the values that form the shard."""
        box = edge.src.shards[self._device].box
        for held in self._flow.sent[edge]:
            yield from _added(self._grads, held.value, _GRAD_SUM, part(grad, held.box, box))

    # --- weights --------------------------------------------------------------------------------

    def _of_weights(self, i: StepInstruction) -> Iterator[Line]:
        uses, device = self._made.uses_of(i), self._device
        here = (u for u in uses if device in u.storage.shards or device in u.sharding.shards)
        yield Line(CallExpression(_method(i), (tuple(use.name for use in here),)))

    def _update(self, i: StepInstruction) -> Iterator[Line]:
        made, tensors = self._made, self._made.subject(i)
        if made.is_asynchronous:
            names, options = tuple(t.name for t in tensors), (("keeps", i.keeps),)
            yield Line(CallExpression("update", (names,), options))
        else:
            shards = {t.name: made.weights.storage[t].shards for t in tensors}
            yield Line(
                CallExpression("update", (tuple(n for n in shards if self._device in shards[n]),))
            )

    def _loss(self, _: StepInstruction) -> Iterator[Line]:
        yield Line(CallExpression("total_loss"))


_METHODS = {
    Verb.RECOMPUTE: "recompute",
    Verb.BACKWARD_WEIGHTS: "backward_weights",
    Verb.OFFLOAD: "offload",
    Verb.RELOAD: "reload",
    Verb.FETCH: "fetch",
    Verb.UNSHARD: "unshard",
    Verb.RESHARD: "reshard",
    Verb.REDUCE: "reduce",
}
"""Methods that take no values of the block."""

_LINES: Mapping[Verb, Callable[[Calls, StepInstruction], Iterator[Line]]] = {
    **dict.fromkeys((Verb.FORWARD, Verb.COMPUTE), Calls._forward),
    Verb.HOLD: Calls._hold,
    **dict.fromkeys((Verb.BACKWARD, Verb.BACKWARD_INPUTS), Calls._backward),
    **dict.fromkeys(
        (Verb.RECOMPUTE, Verb.BACKWARD_WEIGHTS, Verb.OFFLOAD, Verb.RELOAD), Calls._of_segment
    ),
    Verb.KEEP: Calls._keep,
    Verb.RESUME: Calls._resume,
    Verb.MOVE: Calls._move,
    Verb.MOVE_BACK: Calls._move_back,
    Verb.SEND: Calls._send,
    **dict.fromkeys((Verb.RECEIVE, Verb.RECYCLED), Calls._receive),
    Verb.SEND_BACK: Calls._send_back,
    Verb.RECEIVE_BACK: Calls._receive_back,
    **dict.fromkeys(OF_WEIGHTS, Calls._of_weights),
    Verb.UPDATE: Calls._update,
    Verb.LOSS: Calls._loss,
}


_GETTERS: Mapping[Role, Callable[[str], CallExpression]] = {
    Role.INPUT: lambda name: CallExpression("input", (name, Fixed.MICROBATCH)),
    Role.CONSTANT: lambda name: CallExpression("constant", (name,)),
    Role.STATE: lambda name: CallExpression("state", (name, Fixed.MICROBATCH)),
    Role.WEIGHT: lambda name: CallExpression("use", (name,)),
    Role.COPY: lambda name: CallExpression("use", (name,)),
}
"""For values that no instruction of a stage makes, the calls that return them."""


def _argument(value: Value) -> Expression:
    """An argument of a segment that has no gradient."""
    return _GETTERS[value.role](value.name) if value.role in _GETTERS else Variable(value)


def _method(i: StepInstruction) -> str:
    """The method of an instruction, or of one phase of a communication."""
    return f"{i.phase}_{_METHODS[i.kind]}" if i.phase else _METHODS[i.kind]


def _arrived(edge: Edge) -> Variable:
    """What an edge brings to a device."""
    return Variable(Value(Role.ARRIVED, edge.name))


def _sent(edge: Edge) -> Value:
    """What a device writes to an edge."""
    return Value(Role.OUT, edge.name)


def _moved(
    i: StepInstruction,
    method: str,
    sub_transfers: tuple[Transfer, ...],
    given: Expression,
    makes: tuple[Variable, ...] = (),
) -> Line:
    """A move, or a phase of it; a value that stays where it is needs no call."""
    if i.phase is Phase.WAIT:
        return Line(CallExpression(f"wait_{method}", (i.name,)), makes)
    if i.phase is Phase.START:
        return Line(
            CallExpression(f"start_{method}", (i.name, given)), makes, sub_transfers=sub_transfers
        )
    if len(sub_transfers) == 1 and sub_transfers[0].is_idle and given is not Fixed.NONE:
        return Line(given, makes)
    return Line(CallExpression(method, (i.name, given)), makes, sub_transfers=sub_transfers)


def _added(
    totals: dict[Value, Expression], value: Value, form: str, term: Variable | Expression
) -> Iterator[Line]:
    """Add a term, which is not modified, to the total of a value."""
    now, total = totals.get(value), Variable(value, form)
    totals[value] = term if now is None else total
    if now is not None:
        yield Line(Add(now, term), (total,))
