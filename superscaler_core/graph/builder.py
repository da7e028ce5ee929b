"""GraphBuilder: builds a graph op by op, for a front end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from superscaler_core.errors import AnnotationError, PlanError
from superscaler_core.graph.annotation import Annotation
from superscaler_core.graph.graph import Graph, Op, ops_for
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.shard_spec import ShardSpec
from superscaler_core.graph.tensor import ACTIVATION, CONSTANT, INPUT, PARAMETER, PTensor

_TENSOR = "tensor "
"""What names of tensors begin with among all names."""


@dataclass
class GraphBuilder:
    """Builds a graph op by op, for a front end."""

    name: str
    _ops: list[Op] = field(default_factory=list)
    _makers: dict[PTensor, Op] = field(default_factory=dict)
    _inputs: list[PTensor] = field(default_factory=list)
    _learned: set[PTensor] = field(default_factory=set)
    _parameters: dict[str, PTensor] = field(default_factory=dict)
    _aliases: dict[str, str] = field(default_factory=dict)
    _constants: dict[str, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _reserved: set[str] = field(default_factory=set)
    _arguments: dict[str, str] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)
    _casts: dict[PTensor, PTensor] = field(default_factory=dict)
    checkpoint: int = 0
    _marks: dict[str, ShardSpec] = field(default_factory=dict)

    def reserve(self, names: Iterable[str]) -> None:
        """Keep the names of buffers for the constants that they may become."""
        self._reserved.update(names)

    def input(
        self, name: str, shape: Sequence[int], dtype: str, *, learned: bool = False
    ) -> PTensor:
        """Add an argument of the model, with the shape of one microbatch.

        A weight keeps its name, which state dicts have. An argument with the name of a weight
        that was added before is an input of another name. Of one that is ``learned``, the caller
        wants the gradient, which autograd brings to it: what is computed of it has a gradient.
        """
        made = PTensor(self._unique(name), tuple(shape), dtype, INPUT, False)
        self._inputs.append(made)
        if learned:
            self._learned.add(made)
        if made.name != name:
            self._arguments[name] = made.name
        return made

    def has_grad(self, tensor: PTensor) -> bool:
        """Whether the step computes a gradient with respect to a tensor."""
        return tensor.requires_grad or tensor in self._learned

    def parameter(
        self, name: str, shape: Sequence[int], dtype: str, requires_grad: bool = True
    ) -> PTensor:
        """Add a parameter, by its name in the ``state_dict``."""
        made = PTensor(self._unique(name), tuple(shape), dtype, PARAMETER, requires_grad)
        self._parameters[name] = made
        return made

    def alias(self, name: str, of: str) -> None:
        """Add another name for a parameter: a tied weight."""
        self._aliases[name] = of

    def constant(self, name: str, value: Any, shape: Sequence[int], dtype: str) -> PTensor:
        """Add a value that depends on no input and is not trained."""
        self._reserved.discard(name)
        made = PTensor(self._unique(name), tuple(shape), dtype, CONSTANT, False)
        self._constants[made.name] = value
        return made

    def cast(self, tensor: PTensor, dtype: str) -> PTensor:
        """A tensor in another dtype; every op that reads it does the cast itself.

        So the graph has the same ops as without the cast, and plans cut it in the same ways.
        Gradients of a parameter are summed in the dtype of the parameter.
        """
        made = replace(tensor, dtype=dtype)
        self._casts[made] = tensor
        return made

    def uncast(self, tensor: PTensor) -> PTensor:
        """The tensor of which ``tensor`` is a cast; ``tensor`` itself if it is no cast."""
        return self._casts.get(tensor, tensor)

    def value_of(self, tensor: PTensor) -> Any:
        """The value of a constant; None for any other tensor."""
        return self._constants.get(tensor.name) if tensor.kind == CONSTANT else None

    def maker_of(self, tensor: PTensor) -> Op | None:
        """The op that makes a tensor; None for an input, a parameter or a constant."""
        return self._makers.get(tensor)

    def mark(self, tensor: PTensor, spec: ShardSpec) -> None:
        """Record how a tensor is to be cut among devices.

        Raises:
            AnnotationError: another spec was recorded for the tensor.
        """
        before = self._marks.setdefault(self.uncast(tensor).name, spec)
        if before != spec:
            raise AnnotationError(
                f"shard of {tensor}: {str(spec)!r}, and {str(before)!r} before. No op is between, "
                "so they are one tensor of the graph; say one of them."
            )

    def note(self, text: str) -> None:
        """Note a difference between what the graph computes and what the model computes."""
        self._notes += [text] if text not in self._notes else []

    def op(
        self,
        kind: str,
        annotation: Annotation | str,
        inputs: Sequence[PTensor],
        outputs: Sequence[tuple[Sequence[int], str]],
        code: str | Invocation,
        *,
        module: str = "",
        saves: Sequence[int] | None = None,
        flops: float = 1.0,
        differentiable: bool = True,
        num_grads: int | None = None,
        sizes: Mapping[str, int] | None = None,
        imports: Sequence[str] = (),
        hint: str = "",
        modules: Sequence[str] = (),
    ) -> tuple[PTensor, ...]:
        """Add an op and return its outputs.

        Args:
            kind, annotation, inputs, code, module, flops, imports, hint, modules: as in ``Op``.
            outputs: shape and dtype of each output.
            saves: as in ``Op``; all inputs that are not parameters if None.
            differentiable: whether gradients flow through the op, if an input has one.
            num_grads: only this many of its first results have gradients; all if None.
            sizes: sizes of identifiers that the shapes do not determine.

        Raises:
            AnnotationError: the shapes do not fit the annotation.
        """
        code = _casting(code, {i: t.dtype for i, t in enumerate(inputs) if t in self._casts})
        inputs = [self._casts.get(t, t) for t in inputs]
        name = self._unique(f"{module}:{kind}" if module else kind, "op ")
        made = Annotation.parse(annotation) if isinstance(annotation, str) else annotation
        shapes = [tuple(shape) for shape, _ in outputs]
        try:
            found = made.sizes([t.shape for t in inputs], shapes, sizes)
        except AnnotationError as error:
            raise AnnotationError(f"op {name}: {error}") from None
        grad = differentiable and any(map(self.has_grad, inputs))
        with_grad = len(outputs) if num_grads is None else num_grads
        results: tuple[PTensor, ...] = ()
        for i, (shape, (_, dtype)) in enumerate(zip(shapes, outputs, strict=True)):
            own = self._unique(name.replace(":", ".") + (f".{i}" if len(outputs) > 1 else ""))
            is_real = dtype.startswith(("float", "bfloat", "complex"))
            trains = grad and is_real and i < with_grad
            results += (PTensor(own, shape, dtype, ACTIVATION, trains),)
        if saves is None:
            saves = [i for i, t in enumerate(inputs) if t.kind != PARAMETER]
        op = Op(
            len(self._ops), name, kind, module, made, found, tuple(inputs), results, code,
            tuple(saves), flops, tuple(imports), hint=hint, modules=tuple(modules),
            checkpoint=self.checkpoint,
        )  # fmt: skip
        self._ops.append(op)
        self._makers |= dict.fromkeys(results, op)
        return results

    def keep(self, value: PTensor) -> PTensor:
        """Add an op that makes a buffer's new value, whole on every device that reads the buffer.

        Returns:
            The value of the buffer from the next microbatch on.
        """
        at = next(i for i, op in enumerate(self._ops) if value in op.outputs)
        dims = " ".join(f"d{i}^" for i in range(len(value.shape))) or "()"
        (kept,) = self.op(
            "keep", f"{dims} -> {dims}", (value,), [(value.shape, value.dtype)], "{x0}.clone()",
            module=self._ops[at].module, saves=(), flops=0.0,
        )  # fmt: skip
        # The op follows the op that computes the value; it is not at the end of the model.
        self._ops.insert(at + 1, self._ops.pop())
        return kept

    def build(
        self,
        loss: PTensor,
        recycled: Mapping[PTensor, PTensor] | None = None,
        results: Mapping[str, PTensor] | None = None,
        **fields: Any,
    ) -> Graph:
        """The graph whose result is ``loss``, without ops whose results are unused.

        ``fields`` are other attributes of ``Graph``.

        Raises:
            PlanError: the loss is not a scalar, or a recycled value does not fit its input.
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
        state = fields.get("state", {})
        live = {loss, *recycled.values(), *(results or {}).values(), *state, *state.values()}
        ops = tuple(replace(op, index=i) for i, op in enumerate(ops_for(self._ops, live)))
        read = live.union(*(op.inputs for op in ops))
        constants = {t.name for t in read if t.kind == CONSTANT}
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
            results=dict(results or {}),
            marks=dict(self._marks),
            arguments=dict(self._arguments),
            **fields,
        )

    def _unique(self, name: str, among: str = _TENSOR) -> str:
        found, count = name, 1
        while among + found in self._names or (among == _TENSOR and found in self._reserved):
            count += 1
            found = f"{name}_{count}"
        self._names.add(among + found)
        return found


def _casting(code: str | Invocation, dtypes: Mapping[int, str]) -> str | Invocation:
    """The code with casts of some inputs, given by position with the dtype to cast to."""
    for position, dtype in dtypes.items():
        code = code.replace(f"{{x{position}}}", f"{{x{position}}}.to(torch.{dtype})")
    return code
