"""Graph: the forward ops of a model and the tensors between them; plans do not change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.graph.annotation import Annotation
from superscaler_core.graph.form import OpForm, TensorForm
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.name_text import name_text
from superscaler_core.graph.packing import Packing
from superscaler_core.graph.shard_spec import ShardSpec
from superscaler_core.graph.tensor import INPUT, PARAMETER, PTensor
from superscaler_core.grouped import grouped

UPDATE = "update"
"""Kind of the op that applies an optimizer to one parameter."""


@dataclass(frozen=True, eq=False)
class Op:
    """One operator; ops are compared by identity.

    Attributes:
        index: its position in the graph's order, which follows the data flow.
        name: unique in its graph, such as ``layers.0.attn.q:linear``.
        kind: what it computes, such as ``linear``.
        module: path of the module that it comes from.
        annotation: how the dims of its tensors relate.
        sizes: size of every identifier, in iterations.
        inputs, outputs: its tensors.
        computes: the Python expression that computes the op on local shards, with the fields below;
            an ``Invocation`` if it is a call that may get a further argument.
        saves: operands that autograd keeps for the backward, by number; inputs are numbered first,
            then outputs.
        flops: floating-point operations of the forward, per iteration of all loops.
        imports: modules whose functions the code calls, besides those that are always imported.
        copy_of: the op of the model that this op is a copy of (``side_by_side``); None if it is an
            original.
        hint: for an *opaque* op, whose dims have no known relation: how to make it splittable.
            Every device that needs a result of an opaque op computes the whole op. Empty for other
            ops.
        modules: keys of the modules that the code calls (``ops.call_module``).
        checkpoint: number of the call of ``torch.utils.checkpoint`` in the model that it is in; 0
            if it is in none. Ops with the same number are one group.

    The expression may use the fields ``{x0}``, ``{x1}``, ... (the inputs), ``{in0}``, ``{out0}``,
    ... (boxes of the operands, with ``.lo``, ``.hi``, ``.shape``), ``{pad0[2]}``, ... (how far
    windows reach over both ends of dim 2 of an input), ``{size[k]}`` and ``{start[k]}`` (the number
    of local iterations of loop k, and the first), and ``{seed}`` (a number that seeds the op).
    """

    index: int
    name: str
    kind: str
    module: str
    annotation: Annotation
    sizes: Mapping[str, int]
    inputs: tuple[PTensor, ...]
    outputs: tuple[PTensor, ...]
    computes: str | Invocation
    saves: tuple[int, ...]
    flops: float
    imports: tuple[str, ...] = ()
    copy_of: Op | None = None
    hint: str = ""
    modules: tuple[str, ...] = ()
    checkpoint: int = 0

    @property
    def seed(self) -> int:
        """The seed of the op's random numbers, which all copies of the op share."""
        return (self.copy_of or self).index

    @cached_property
    def form(self) -> OpForm:
        """The op's form, which the same op of other layers shares."""
        inputs, outputs = (
            tuple(TensorForm(t.shape, t.dtype, t.kind, t.requires_grad) for t in side)
            for side in (self.inputs, self.outputs)
        )
        return OpForm.of(
            self.kind, self.annotation, tuple(self.sizes.items()), inputs, outputs,
            self.computes, self.saves, self.flops,
        )  # fmt: skip

    @property
    def code(self) -> str:
        """The expression as text."""
        return str(self.computes)

    def is_splittable(self, identifier: str) -> bool:
        """Whether the loop can be cut."""
        return identifier not in self.form.uncut

    @cached_property
    def reads_batch(self) -> bool:
        """Whether an input is a part of the batch."""
        return any(tensor.kind == INPUT for tensor in self.inputs)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The positions of the inputs that are parameters."""
        return tuple(i for i, tensor in enumerate(self.inputs) if tensor.kind == PARAMETER)

    @property
    def parameters(self) -> tuple[PTensor, ...]:
        """The parameters that it reads."""
        return tuple(self.inputs[position] for position in self.weights)

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __str__(self) -> str:
        reads = ", ".join(map(str, self.inputs))
        writes = ", ".join(map(str, self.outputs))
        return f"{self.name}: {reads} -> {writes}  ({self.annotation})"


@dataclass(frozen=True, slots=True)
class TokenSlices:
    """How the sequence of a graph is cut into slices, stage by stage.

    Attributes:
        lengths: tokens of every slice.
        stages: names of the ops at which the second and each later stage begin.
    """

    lengths: tuple[int, ...]
    stages: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f" at {', '.join(map(name_text, self.stages))}" if self.stages else ""
        return ",".join(map(str, self.lengths)) + at


@dataclass(frozen=True, eq=False)
class Total:
    """An input of a graph that is a sum or mean over the whole batch, such as a number of labels.

    Attributes:
        given: the input, which has the value of the whole batch in every microbatch.
        ops: the ops that compute the value of a microbatch from the batch, in their order.
        result: what the last of them writes.
        is_mean: whether the value is the mean of those of microbatches, and not their sum.
    """

    given: PTensor
    ops: tuple[Op, ...]
    result: PTensor
    is_mean: bool


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured model: the computation of one microbatch, from inputs to a scalar loss.

    Laws (tests/superscaler_core/graph/test_graph.py): an op reads only inputs, parameters,
    constants and what ops before it write; every activation is written by one op.

    Attributes:
        name: name of the model.
        ops: forward ops in an order that follows the data flow.
        inputs: the inputs of a microbatch, by position of the model's arguments.
        parameters: by the names of the model's ``state_dict``; a tied weight has one entry.
        aliases: other names of tied weights: name -> name in ``parameters``.
        constants: values that depend on no input, by name.
        loss: the scalar.
        notes: differences between the graph and the model, for people; usually empty.
        recycled: inputs that the caller does not give, each with the activation whose value it has
            in the next pass of the same microbatch; in the first pass the input is zero.
        weights: the captured model's own parameters, not copies, by the names of ``parameters``;
            empty if the graph has no model, or its model is on the meta device.
        buffers: other entries of the model's ``state_dict``, by name, as at the capture.
        packed: how the graph reads parameters whose features are several pieces, by name.
        folded: the buffers from which constants were computed, so that they can no longer change.
        valueless: buffers on the meta device that the graph needs: the graph can be planned, but
            not run.
        state: buffers that a forward replaces, such as running statistics. Each is a constant of
            the graph, with the activation that is its value from the next microbatch on.
        more_losses: the losses of further copies of the model (``side_by_side``).
        results: activations that a program returns beside the loss, by name.
        more_results: the results of further copies of the model, with their names.
        marks: how the model asks for tensors to be cut (``shard``), by tensor name; a parameter's
            dims are those that it has in the model.
        slices: how the sequence was cut, if ``token_slices`` made this graph; else None.
        extra: what the model's ``state_dict`` has beside tensors of the model, by name, as at the
            capture (``get_extra_state``).
        averages: the buffers that are frozen parameters of the model, which a forward changes.
        arguments: arguments of the model that have the name of a weight, each with its input.
        samples: the dim of inputs that has the samples, by name, where it is not dim 0; None for an
            input that belongs to all samples.
        carried: results of which every device keeps a box: those that are an input of the next
            step, each with that input, of which the device will read the box; and those that stay
            where they are made, with None.
        totals: inputs that are not given, but found from the whole batch before a step; each may
            read those before it.
    """

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[PTensor, ...]
    parameters: Mapping[str, PTensor]
    aliases: Mapping[str, str]
    constants: Mapping[str, Any]
    loss: PTensor
    notes: tuple[str, ...] = ()
    recycled: Mapping[PTensor, PTensor] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Any] = field(default_factory=dict)
    packed: Mapping[str, Packing] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()
    valueless: frozenset[str] = frozenset()
    state: Mapping[PTensor, PTensor] = field(default_factory=dict)
    more_losses: tuple[PTensor, ...] = ()
    results: Mapping[str, PTensor] = field(default_factory=dict)
    more_results: tuple[tuple[str, PTensor], ...] = ()
    marks: Mapping[str, ShardSpec] = field(default_factory=dict)
    slices: TokenSlices | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    averages: frozenset[str] = frozenset()
    arguments: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, int | None] = field(default_factory=dict)
    totals: tuple[Total, ...] = ()
    carried: Mapping[str, PTensor | None] = field(default_factory=dict)

    def samples_dim(self, given: PTensor) -> int | None:
        """The dim of an input that has the samples; None if none has."""
        return self.samples.get(given.name, 0 if given.shape else None)

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Results that ``once_per_graph`` and ``known_of`` keep for this graph."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "known"}

    @property
    def losses(self) -> tuple[PTensor, ...]:
        """The losses of all copies of the model; each microbatch has one of them."""
        return self.loss, *self.more_losses

    @cached_property
    def results_of(self) -> Mapping[PTensor, tuple[str, ...]]:
        """The names of each activation that is a result, over all copies of the model."""
        named = (*self.results.items(), *self.more_results)
        return {t: tuple(names) for t, names in grouped((t, name) for name, t in named).items()}

    @property
    def ends(self) -> tuple[PTensor, ...]:
        """The activations that are read outside of the graph: losses, and new values of buffers."""
        return *self.losses, *self.state.values()

    @cached_property
    def ops_with_backward(self) -> frozenset[Op]:
        """The ops through which gradients of a loss flow; an op under ``no_grad`` is none."""
        reached, found = set(self.losses), set()
        for op in reversed(self.ops):
            if any(tensor in reached and tensor.requires_grad for tensor in op.outputs):
                found.add(op)
                reached.update(op.inputs)
        return frozenset(found)

    @property
    def batch_inputs(self) -> tuple[PTensor, ...]:
        """The inputs that the caller gives for every microbatch: all but recycled ones."""
        return tuple(t for t in self.inputs if t not in self.recycled)

    @property
    def opaque(self) -> tuple[Op, ...]:
        """The ops that no plan can split, because nothing says how their dims relate."""
        return tuple(op for op in self.ops if op.hint)

    @cached_property
    def updates(self) -> Mapping[str, Op]:
        """For every parameter, the op that applies an optimizer; it is elementwise in all dims."""
        return {
            name: _update(len(self.ops) + i, tensor)
            for i, (name, tensor) in enumerate(self.parameters.items())
        }

    @cached_property
    def producer(self) -> Mapping[PTensor, Op]:
        """The op that writes an activation."""
        return {tensor: op for op in self.ops for tensor in op.outputs}

    @cached_property
    def readers(self) -> Mapping[PTensor, tuple[tuple[Op, int], ...]]:
        """The ops that read a tensor, each with the tensor's position among the op's inputs."""
        found = grouped((t, (op, i)) for op in self.ops for i, t in enumerate(op.inputs))
        return {tensor: tuple(uses) for tensor, uses in found.items()}

    def ops_in(self, *patterns: str) -> tuple[Op, ...]:
        """Ops of modules whose path fits a pattern, such as ``layers.*.attn`` or ``*.experts``.

        Ops of modules inside a matching module are included.
        """
        return tuple(op for op in self.ops if is_in(op.module, patterns))

    def parameter(self, name: str) -> PTensor:
        """A parameter by any of its names.

        Raises:
            PlanError: there is no such parameter; the message names similar ones.
        """
        found = self.parameters.get(self.aliases.get(name, name))
        if found is None:
            near = get_close_matches(name, [*self.parameters, *self.aliases], 3, 0.0)
            raise PlanError(f"{self.name} has no parameter {name!r}; it has {', '.join(near)}.")
        return found

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {len(self.ops)} ops", *map(str, self.ops)])


def ops_for(ops: Sequence[Op], tensors: Iterable[PTensor]) -> tuple[Op, ...]:
    """The ops, in their order, on which some tensors depend."""
    needed, found = set(tensors), list[Op]()
    for op in reversed(ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            found.append(op)
    return tuple(reversed(found))


def is_in(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module path matches one of the patterns, or is inside a matching module."""
    around = paths(module)
    return any(fnmatchcase(path, pattern) for pattern in patterns for path in around)


def paths(module: str) -> list[str]:
    """The paths of a module and of the modules around it, the outermost first."""
    return list(accumulate(module.split("."), "{}.{}".format))


def _update(index: int, tensor: PTensor) -> Op:
    dims = " ".join(f"d{i}" for i in range(len(tensor.shape))) or "()"
    annotation = Annotation.parse(f"{dims}, {dims} -> {dims}")
    sizes = {f"d{i}": size for i, size in enumerate(tensor.shape)}
    return Op(
        index, f"{tensor.name}:update", UPDATE, tensor.name, annotation, sizes,
        (tensor, tensor), (tensor,), "", (), 0.0,
    )  # fmt: skip
