"""Converts a traced program to a graph: constants are folded, every other call goes to its rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from superscaler_core.errors import AnnotationError, CaptureError
from superscaler_core.front_end.dense import check_dense
from superscaler_core.front_end.overlapping_memory import check_apart
from superscaler_core.front_end.shard import TARGET as SHARD
from superscaler_core.front_end.small_constants import compact, is_folded, run_small
from superscaler_core.front_end.state_names import StateNames
from superscaler_core.front_end.storage import Storages, written
from superscaler_core.graph.builder import GraphBuilder
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.packed import find_packings
from superscaler_core.graph.packing import Packing
from superscaler_core.graph.shard_spec import ShardSpec
from superscaler_core.graph.tensor import ACTIVATION, INPUT, PARAMETER, PTensor
from superscaler_core.rules import opaque, rule_of
from superscaler_core.rules.call import NoRuleError, RuleCall, broadcast_to, names, text
from superscaler_core.rules.records import (
    Node,
    Ref,
    TracedProgram,
    TracedValue,
    mapped,
    refs_in,
)
from superscaler_core.rules.shape import view_of
from superscaler_core.rules.table import LIKE


def graph_of(
    program: TracedProgram,
    model: nn.Module,
    name: str,
    recycled: Mapping[str, int],
    results: Sequence[str] = (),
    changing: Collection[str] = (),
    learned: Sequence[bool] = (),
) -> Graph:
    """Turn a program that was traced from a model into a graph of this name.

    Args:
        program, model, name: the program, the model and the name.
        recycled: inputs, each with the number of the output that is its value in the next pass.
        results: names of the last outputs of the program, which are kept beside the loss.
        changing: as in ``capture``.
        learned: for every input, whether the step computes its gradient; none if not given.

    Raises:
        CaptureError: a call cannot be a part of a graph; the message names the call.
    """
    made = _Conversion(program, model, name, changing, {}).graph(recycled, results, learned)
    if packings := find_packings(made):
        again = _Conversion(program, model, name, changing, packings)
        made = again.graph(recycled, results, learned)
    return made


def _filled(args: Mapping[str, Any], known: Mapping[Ref, Any]) -> dict[str, Any]:
    """The arguments of a call with values in place of refs."""
    found: dict[str, Any] = mapped(args, lambda v: known[v] if isinstance(v, Ref) else v)
    return found


class _Conversion:
    """The conversion of one program: it computes the calls that ``Storages`` passes on.

    Attributes:
        values: the value of every ref: a pTensor, or a real constant.
        constants: constants of the graph, by the ref of their value.
        by_memory: constants of the graph, by the memory, dtype and shape of their value.
        kept: buffers, and other tensors that the model keeps, as they were at the capture.
        state: buffers that the program writes, by the ref of their first value.
        written: the memory that the program writes, by the ref of its first value.
        averages: frozen parameters that are state, like buffers, because the program writes them
            (an average of other parameters, as in BYOL and MoCo), by name.
        folded: names of the kept tensors from which a constant was computed.
        without_value: constants on the meta device, with the names of the kept tensors that they
            depend on.
        valueless: names of kept tensors on the meta device on which the graph depends.
    """

    def __init__(
        self,
        program: TracedProgram,
        model: nn.Module,
        name: str,
        changing: Collection[str],
        packings: Mapping[str, Packing],
    ) -> None:
        self.model, self.changing = model, changing
        self.names = names = StateNames.of(model)
        self.program = replace(
            program,
            parameters={at: names.of_path[path] for at, path in program.parameters.items()},
            buffers={at: names.of_path[path] for at, path in program.buffers.items()},
        )
        self.packings, self.builder = packings, GraphBuilder(name)
        self.values: dict[Ref, PTensor | Tensor] = {}
        self.constants: dict[Ref, PTensor] = {}
        self.by_memory: dict[Hashable, PTensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.folded: set[str] = set()
        self.without_value: dict[Ref, tuple[str, ...]] = {}
        self.valueless: set[str] = set()
        self.state: dict[Ref, PTensor] = {}
        self.written = written(program.nodes)
        self.averages = self._find_averages()
        self.storages = Storages(self)

    def graph(
        self, recycled: Mapping[str, int], results: Sequence[str], learned: Sequence[bool]
    ) -> Graph:
        # State dicts have the names of weights, so that these names come first.
        self._add_parameters()
        self.builder.reserve([*self.program.buffers.values(), *self.averages])
        for i, (name, value) in enumerate(self.program.inputs):
            is_learned = i < len(learned) and learned[i]
            made = self.builder.input(name, value.shape, value.dtype, learned=is_learned)
            self.values[Ref(name)] = made
        self._add_constants()
        for node in self.program.nodes:
            self.builder.checkpoint = node.checkpoint
            try:
                self.storages.run(node)
            except CaptureError as error:
                error.node = node.name
                raise
        state = self._state()
        num_own = 1 + max(recycled.values(), default=0)
        num = num_own + len(results)
        return self.builder.build(
            self._output(0, num),
            {self._input(name): self._output(i, num) for name, i in recycled.items()},
            {name: self._output(i, num) for i, name in enumerate(results, num_own)},
            weights=self._weights(),
            buffers=self._buffers(),
            packed=self.packings,
            extra=self.names.extra,
            averages=frozenset(self.averages),
            folded=frozenset(self.folded),
            valueless=frozenset(self.valueless),
            state=state,
        )

    def _state(self) -> dict[PTensor, PTensor]:
        """The buffers that the program replaces, each with its value afterwards."""
        found = {}
        for ref, buffer in self.state.items():
            value = self._tensor(self.storages.read(ref))
            if value.requires_grad:
                raise CaptureError(
                    f"{self.builder.name} keeps a value with a gradient in buffer {buffer.name!r}; "
                    "detach what is written there."
                )
            if value.kind != ACTIVATION:
                raise CaptureError(
                    f"{self.builder.name} replaces buffer {buffer.name!r} by {value.kind} "
                    f"{value.name!r}, which no op computes."
                )
            found[buffer] = self.builder.keep(value)
        return found

    def _weights(self) -> dict[str, Tensor]:
        """The model's own parameters, if they have values."""
        named = ((self.names.of_path[path], p) for path, p in self.model.named_parameters())
        found: dict[str, Tensor] = {n: p for n, p in named if n not in self.averages}
        return {} if any(tensor.is_meta for tensor in found.values()) else found

    def _buffers(self) -> dict[str, Tensor]:
        """The entries of the model's ``state_dict`` beside parameters; zeros if without value."""
        saved = {n: value for n, value in self.names.buffers.items() if n in self.names.saved}
        return {
            name: torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value
            for name, buffer in {**saved, **self.averages}.items()
            for value in [self.kept.get(name, buffer.detach())]
        }

    def _find_averages(self) -> dict[str, Tensor]:
        places = {ref.name for ref in self.written}
        names = {n for place, n in self.program.parameters.items() if place in places}
        given: Mapping[str, Tensor] = self.names.parameters
        is_state = {n for n in names | {*self.changing} if n in given}
        found = {n: given[n] for n in sorted(is_state) if not given[n].requires_grad}
        for name, parameter in found.items():
            if also := [n for n, p in given.items() if p is parameter and n != name]:
                raise CaptureError(
                    f"{type(self.model).__name__} writes parameter {name!r}, which is also "
                    f"{', '.join(map(repr, also))}; keep the copy that is written in a parameter "
                    "of its own."
                )
        return found

    def _add_parameters(self) -> None:
        """Every parameter of the model under its first name, tied ones as aliases of it."""
        first: dict[int, str] = {}
        made: dict[str, PTensor] = {}
        for name, tensor in self.names.parameters.items():
            if name in self.averages:
                continue
            of = first.setdefault(id(tensor), name)
            if of == name:
                made[name] = self._parameter(name, tensor)
            else:
                made[name] = made[of]
                self.builder.alias(name, of)
        for place, name in self.program.parameters.items():
            if name not in self.averages:
                self.values[Ref(place)] = made[name]

    def _parameter(self, name: str, tensor: Tensor) -> PTensor:
        """A parameter, in the shape that it has in the model."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        packing = self.packings.get(name)
        if packing is None:
            return self.builder.parameter(name, shape, dtype, tensor.requires_grad)
        apart = packing.shape(shape)
        made = self.builder.parameter(name, apart, dtype, tensor.requires_grad)
        # No op reads this view: rules read the parameter that it is a view of.
        return view_of(self.builder, made, shape)

    def _add_constants(self) -> None:
        buffers = self.names.buffers
        read = {**self.program.buffers, **self.program.parameters}.items()
        known = {**buffers, **self.averages}
        given = {place: (name, known[name]) for place, name in read if name in known}
        for place, (name, value) in {**given, **self.program.constants}.items():
            if value.requires_grad:
                raise CaptureError(
                    f"{self.builder.name} reads {name!r}, which needs a gradient but is no "
                    "parameter: make it an nn.Parameter that is registered, or detach it."
                )
            self.kept[name] = self.values[Ref(place)] = value.detach().clone()
            if value.is_meta:
                self.without_value[Ref(place)] = (name,)
        check_dense("tensor", dict(self.program.constants.values()))
        check_apart(dict(self.model.named_parameters()), dict(self.program.constants.values()))
        for place, (name, value) in given.items():
            ref = Ref(place)
            if ref in self.written:
                self.state[ref] = self.values[ref] = self._constant(ref, self.kept[name])
            elif name in self.changing and not value.is_meta:
                self.values[ref] = self._constant(ref, self.kept[name])

    # --- the methods that `Storages` calls --------------------------------------------------------

    def describe(self, value: Ref) -> TracedValue:
        found = self.values[value]
        return TracedValue(tuple(found.shape), str(found.dtype).removeprefix("torch."))

    def has_grad(self, value: Ref) -> bool:
        return self.values[value].requires_grad

    def check_writable(self, value: Ref, node: Node) -> None:
        found = self.values[value]
        for name, kept in self.kept.items():
            if kept is found:
                raise CaptureError(
                    f"{node.target} in {node.place} changes tensor {name!r} in the forward pass; "
                    "register it as a buffer, so that a state dict has it."
                )
        if isinstance(found, PTensor) and found.kind == PARAMETER:
            raise CaptureError(
                f"{node.target} in {node.place} writes parameter {found.name!r} in place, which is "
                "trained; use the form that returns a new tensor, or freeze the parameter."
            )

    def add(self, node: Node) -> None:
        """Convert a call: constants are computed now, other results by ops of the graph."""
        if node.base == SHARD:
            marked = self.values[node.args["x"]]
            if isinstance(marked, PTensor):
                self._mark(marked, node)
            return
        if node.base in LIKE:
            node = replace(node, args={**node.args, "self": self._stand_in(node.args["self"])})
        read = [self.values[ref] for ref in refs_in(node.args)]
        constants = [value for value in read if isinstance(value, Tensor)]
        results: list[PTensor | Tensor] = []
        if node.outputs and not node.returns_list and not any(prod(v.shape) for v in node.outputs):
            # What has no elements, as the result of nn.Linear(8, 0), depends on nothing.
            results += [torch.zeros(v.shape, dtype=getattr(torch, v.dtype)) for v in node.outputs]
        elif node.is_autocast and isinstance(read[0], PTensor):
            results.append(self.builder.cast(read[0], node.outputs[0].dtype))
        elif not node.is_random and len(constants) == len(read) and is_folded(node, constants):
            results += self._folded(node)
        else:
            results += self._ruled(node)
        self.values |= {Ref(node.name, i): result for i, result in enumerate(results)}

    def _mark(self, tensor: PTensor, node: Node) -> None:
        maker = self.builder.maker_of(tensor)
        if maker is not None and maker.inputs[0].name in self.packings:
            tensor = maker.inputs[0]  # the parameter itself, whose dims the spec names
        try:
            self.builder.mark(tensor, ShardSpec.parse(node.args["spec"]))
        except AnnotationError as error:
            raise CaptureError(f"{node.place}: {error}") from None

    def _stand_in(self, ref: Ref) -> Tensor:
        """A constant of a tensor's shape and dtype that takes no memory."""
        like = self.values[ref]
        dtype = getattr(torch, like.dtype) if isinstance(like, PTensor) else like.dtype
        return torch.zeros((), dtype=dtype).expand(like.shape)

    def _folded(self, node: Node) -> Sequence[Tensor]:
        given = list(refs_in(node.args))
        read = [self.values[ref] for ref in given]
        self.folded |= {name for name, value in self.kept.items() if any(value is r for r in read)}
        results = run_small(node, _filled(node.args, self.values))
        if unknown := {name for ref in given for name in self.without_value.get(ref, ())}:
            refs = (Ref(node.name, i) for i in range(len(results)))
            self.without_value |= dict.fromkeys(refs, tuple(sorted(unknown)))
        return results

    def _ruled(self, node: Node) -> Sequence[PTensor]:
        known = {ref: self._tensor(ref, node.module) for ref in refs_in(node.args)}
        call = RuleCall(node, _filled(node.args, known), self.builder, self._is_known)
        try:
            result = rule_of(call)(call)
        except (NoRuleError, AnnotationError):
            result = opaque(call)
        results = (result,) if isinstance(result, PTensor) else tuple(result)
        if not node.with_grad and not node.is_passed_on:
            # If a rule returns an argument, torch returns another tensor here, without gradient.
            given = {tensor for tensor in call.tensors if self.builder.has_grad(tensor)}
            results = tuple(call.without_grad(x) if x in given else x for x in results)
        return results

    def _is_known(self, tensor: PTensor, has_property: Callable[[Tensor], bool]) -> bool:
        """``RuleCall.is_known``; the values of buffers that change are not known."""
        value = self.builder.value_of(tensor)
        places = (*self.program.buffers, *self.program.parameters)
        changes = any(self.values[Ref(place)] is tensor for place in places)
        if value is None or value.is_meta or changes or not has_property(value):
            return False
        self.folded |= {tensor.name} & self.kept.keys()
        return True

    def _tensor(self, ref: Ref, module: str = "") -> PTensor:
        """The graph's tensor for a ref; a constant is added to the graph when it is first read."""
        value = self.values[ref]
        if isinstance(value, PTensor):
            return value
        if ref not in self.constants and self._name(ref) in self.kept:
            # It keeps the shape of the buffer, because other values of the buffer may be loaded.
            self.constants[ref] = self._constant(ref, value)
            if self.constants[ref].name != self._name(ref):
                self.folded.add(self._name(ref))
        if ref not in self.constants:
            # Layers that take the same view of a tensor share one constant.
            memory = value.untyped_storage()._cdata, value.storage_offset()
            key = (*memory, value.dtype, value.shape, value.stride())
            if key not in self.by_memory:
                made = self._constant(ref, compact(value))
                is_whole = made.shape == tuple(value.shape)
                self.by_memory[key] = made if is_whole else self._expanded(made, value, module)
            self.constants[ref] = self.by_memory[key]
        return self.constants[ref]

    def _name(self, ref: Ref) -> str:
        """The name of a constant: its name in the model, if it has one."""
        if ref.name in self.program.constants:
            return self.program.constants[ref.name][0]
        named = {**self.program.parameters, **self.program.buffers}
        return named.get(ref.name, f"constant.{ref.name}")

    def _constant(self, ref: Ref, value: Tensor) -> PTensor:
        dtype = str(value.dtype).removeprefix("torch.")
        made = self.builder.constant(self._name(ref), value.clone(), value.shape, dtype)
        if value.is_meta:
            self.valueless.update(self.without_value[ref])
        return made

    def _expanded(self, small: PTensor, value: Tensor, module: str) -> PTensor:
        dims = names(value.dim())
        (made,) = self.builder.op(
            "expand", f"{broadcast_to(small.shape, dims, value.shape)} -> {text(dims)}", (small,),
            [(value.shape, small.dtype)], "{x0}.expand({out0.shape})", module=module,
            saves=(), flops=0.0, differentiable=False,
        )  # fmt: skip
        return made

    def _input(self, name: str) -> PTensor:
        """An input by its name."""
        found = self.values.get(Ref(name))
        if not isinstance(found, PTensor) or found.kind != INPUT:
            names = ", ".join(name for name, _ in self.program.inputs)
            raise CaptureError(
                f"recycled: {self.builder.name} has no input {name!r}; it has {names}."
            )
        return found

    def _output(self, number: int, num_outputs: int) -> PTensor:
        """One result of the model: the loss is number 0."""
        if len(self.program.outputs) != num_outputs:
            more = f"the loss and {num_outputs - 1} more"
            wanted = "the loss alone" if num_outputs == 1 else more
            raise CaptureError(
                f"{self.builder.name} returns {len(self.program.outputs)} tensors; a model to be "
                f"captured returns {wanted}: first the loss, such as a mean over the microbatch, "
                "then what recycled=... names."
            )
        found = self.values[self.storages.read(self.program.outputs[number])]
        if not isinstance(found, PTensor) or found.kind != "activation":
            raise CaptureError(
                f"{self.builder.name} returns a value that no op computes from its inputs; "
                + ("it has to return the loss." if number == 0 else "it cannot be kept.")
            )
        return found
