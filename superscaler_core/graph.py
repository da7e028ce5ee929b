"""Graph: the forward ops of a model and the tensors between them; plans do not change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from superscaler_core.annotation import Annotation
from superscaler_core.errors import AnnotationError, PlanError
from superscaler_core.tensor import PARAMETER, PTensor

UPDATE = "update"
"""Kind of the op that applies an optimizer to one parameter."""


@dataclass(frozen=True, eq=False)
class Op:
    """One operator; it is itself, so two are equal only if they are one.

    Attributes:
        index: its place in the graph's order, which data flow allows.
        name: unique in its graph, such as ``layers.0.attn.q:linear``.
        kind: what it computes, such as ``linear``.
        module: path of the module that it comes from.
        annotation: how the dims of its tensors relate.
        sizes: of every identifier, in iterations.
        inputs, outputs: its tensors.
        code: the Python expression that computes it on local shards, with fields (below).
        saves: which operands autograd keeps for the backward: numbers of inputs, then of outputs.
        flops: floating-point operations of one iteration of all loops, forward.

    ``code`` may use the fields ``{x0}``, ``{x1}``, ... (the inputs), ``{in0}``, ``{out0}``, ...
    (boxes of the operands, with ``.lo``, ``.hi``, ``.shape``), ``{pad0[2]}``, ... (how far windows
    reach over both ends of dim 2 of an input), ``{size[k]}`` and ``{start[k]}`` (iterations of loop
    k here, and the first) and ``{seed}`` (a number of this op's own).
    """

    index: int
    name: str
    kind: str
    module: str
    annotation: Annotation
    sizes: Mapping[str, int]
    inputs: tuple[PTensor, ...]
    outputs: tuple[PTensor, ...]
    code: str
    saves: tuple[int, ...]
    flops: float

    def is_splittable(self, identifier: str) -> bool:
        """Whether the loop can be cut."""
        return self.annotation.is_splittable(identifier, self.sizes)

    @property
    def parameters(self) -> tuple[PTensor, ...]:
        """The parameters that it reads."""
        return tuple(t for t in self.inputs if t.kind == PARAMETER)

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __str__(self) -> str:
        reads = ", ".join(map(str, self.inputs))
        writes = ", ".join(map(str, self.outputs))
        return f"{self.name}: {reads} -> {writes}  ({self.annotation})"


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured model: one microbatch's way from inputs to a scalar loss.

    Laws (tests/superscaler_core/test_graph.py): an op reads only inputs, parameters, constants and
    what ops before it write; every activation is written by one op.

    Attributes:
        name: of the model.
        ops: forward ops in an order that data flow allows.
        inputs: what a microbatch consists of, by position of the model's arguments.
        parameters: by the names of the model's ``state_dict``; a tied weight has one.
        aliases: other names of tied weights: name -> name in ``parameters``.
        constants: values that depend on no input, by name.
        loss: the scalar.
        notes: what the capture changed in the model's meaning, for people; usually empty.
        recycled: inputs that nobody gives: each with the activation that it is in the next turn of
            the same microbatch, and zeros in the first.
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

    @property
    def batch_inputs(self) -> tuple[PTensor, ...]:
        """What is given for every microbatch: all inputs but those that are recycled."""
        return tuple(t for t in self.inputs if t not in self.recycled)

    @cached_property
    def updates(self) -> Mapping[str, Op]:
        """The op that applies an optimizer, for every parameter: elementwise in all dims."""
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
        """Who reads a tensor, and as which of its inputs."""
        found: dict[PTensor, list[tuple[Op, int]]] = {}
        for op in self.ops:
            for position, tensor in enumerate(op.inputs):
                found.setdefault(tensor, []).append((op, position))
        return {tensor: tuple(uses) for tensor, uses in found.items()}

    def ops_in(self, *patterns: str) -> tuple[Op, ...]:
        """Ops of modules whose path fits a pattern, such as ``layers.*.attn`` or ``*.experts``.

        What is inside a module that fits is meant too.
        """
        return tuple(op for op in self.ops if is_in(op.module, patterns))

    def parameter(self, name: str) -> PTensor:
        """A parameter by any of its names.

        Raises:
            PlanError: there is none; the message names the nearest.
        """
        found = self.parameters.get(self.aliases.get(name, name))
        if found is None:
            import difflib

            near = difflib.get_close_matches(name, [*self.parameters, *self.aliases], 3, 0.0)
            raise PlanError(f"{self.name} has no parameter {name!r}; it has {', '.join(near)}.")
        return found

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {len(self.ops)} ops", *map(str, self.ops)])


def is_in(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module path fits one of the patterns, or is inside a module that does."""
    names = module.split(".")
    paths = [".".join(names[: i + 1]) for i in range(len(names))]
    return any(fnmatchcase(path, pattern) for pattern in patterns for path in paths)


def _update(index: int, tensor: PTensor) -> Op:
    dims = " ".join(f"d{i}" for i in range(len(tensor.shape))) or "()"
    annotation = Annotation.parse(f"{dims}, {dims} -> {dims}")
    sizes = {f"d{i}": size for i, size in enumerate(tensor.shape)}
    return Op(
        index, f"{tensor.name}:update", UPDATE, tensor.name, annotation, sizes,
        (tensor, tensor), (tensor,), "", (), 0.0,
    )  # fmt: skip


@dataclass
class GraphBuilder:
    """Makes a graph op by op; what a front end calls."""

    name: str
    _ops: list[Op] = field(default_factory=list)
    _inputs: list[PTensor] = field(default_factory=list)
    _parameters: dict[str, PTensor] = field(default_factory=dict)
    _aliases: dict[str, str] = field(default_factory=dict)
    _constants: dict[str, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _notes: list[str] = field(default_factory=list)

    def input(self, name: str, shape: Sequence[int], dtype: str) -> PTensor:
        """An argument of the model, of one microbatch."""
        self._inputs.append(PTensor(self._unique(name), tuple(shape), dtype, "input", False))
        return self._inputs[-1]

    def parameter(
        self, name: str, shape: Sequence[int], dtype: str, requires_grad: bool = True
    ) -> PTensor:
        """A parameter, by its name in the ``state_dict``."""
        made = PTensor(self._unique(name), tuple(shape), dtype, PARAMETER, requires_grad)
        self._parameters[name] = made
        return made

    def alias(self, name: str, of: str) -> None:
        """Another name of a parameter: a tied weight."""
        self._aliases[name] = of

    def constant(self, name: str, value: Any, shape: Sequence[int], dtype: str) -> PTensor:
        """A value that depends on no input and is not trained."""
        made = PTensor(self._unique(name), tuple(shape), dtype, "constant", False)
        self._constants[made.name] = value
        return made

    def note(self, text: str) -> None:
        """Say what the graph computes differently from the model."""
        self._notes += [text] if text not in self._notes else []

    def op(
        self,
        kind: str,
        annotation: Annotation | str,
        inputs: Sequence[PTensor],
        outputs: Sequence[tuple[Sequence[int], str]],
        code: str,
        *,
        module: str = "",
        saves: Sequence[int] | None = None,
        flops: float = 1.0,
        differentiable: bool = True,
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[PTensor, ...]:
        """Add an op and return its outputs.

        Args:
            kind: what it computes.
            annotation: of its tensors.
            inputs: tensors of this graph.
            outputs: shape and dtype of each.
            code: as of ``Op``.
            module: path of its module.
            saves: as of ``Op``; all inputs that are no parameters if None.
            flops: as of ``Op``.
            differentiable: whether gradients flow through it, if an input has one.
            sizes: of identifiers that the shapes do not say.

        Raises:
            AnnotationError: the shapes do not fit the annotation.
        """
        name = self._unique(f"{module}:{kind}" if module else kind, "op ")
        made = Annotation.parse(annotation) if isinstance(annotation, str) else annotation
        shapes = [tuple(shape) for shape, _ in outputs]
        try:
            found = made.sizes([t.shape for t in inputs], shapes, sizes)
        except AnnotationError as error:
            raise AnnotationError(f"op {name}: {error}") from None
        grad = differentiable and any(t.requires_grad for t in inputs)
        results = tuple(
            PTensor(
                self._unique(name.replace(":", ".") + (f".{i}" if len(outputs) > 1 else "")),
                shape,
                dtype,
                "activation",
                grad and dtype.startswith(("float", "bfloat")),
            )
            for i, (shape, (_, dtype)) in enumerate(zip(shapes, outputs, strict=True))
        )
        if saves is None:
            saves = [i for i, t in enumerate(inputs) if t.kind != PARAMETER]
        self._ops.append(
            Op(
                len(self._ops), name, kind, module, made, found,
                tuple(inputs), results, code, tuple(saves), flops,
            )
        )  # fmt: skip
        return results

    def build(self, loss: PTensor, recycled: Mapping[PTensor, PTensor] | None = None) -> Graph:
        """The graph whose result is ``loss``, without ops that nobody reads.

        Args:
            loss: a scalar.
            recycled: as of ``Graph``.

        Raises:
            PlanError: the loss is no scalar, or what is recycled does not fit.
        """
        recycled = recycled or {}
        if loss.shape:
            raise PlanError(
                f"{self.name}: the loss has shape {list(loss.shape)}; the model has to return a "
                "scalar, such as a mean over the microbatch."
            )
        for given, made in recycled.items():
            if (given.shape, given.dtype) != (made.shape, made.dtype):
                raise PlanError(
                    f"{self.name}: {made} of {made.dtype} is recycled as {given} of {given.dtype}; "
                    "shape and dtype have to be the same."
                )
        live = {loss, *recycled.values()}
        kept: list[Op] = []
        for op in reversed(self._ops):
            if live.intersection(op.outputs):
                live.update(op.inputs)
                kept.append(op)
        ops = tuple(replace(op, index=i) for i, op in enumerate(reversed(kept)))
        constants = {t.name for t in live if t.kind == "constant"}
        return Graph(
            self.name,
            ops,
            tuple(self._inputs),
            dict(self._parameters),
            dict(self._aliases),
            {name: value for name, value in self._constants.items() if name in constants},
            loss,
            tuple(self._notes),
            dict(recycled),
        )

    def _unique(self, name: str, among: str = "tensor ") -> str:
        found, count = name, 1
        while among + found in self._names:
            count += 1
            found = f"{name}_{count}"
        self._names.add(among + found)
        return found
