"""Call: the view that a rule has of one traced call, and how it adds ops to the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from string import Formatter
from typing import Any

from torch import Tensor

from superscaler_core.errors import CaptureError
from superscaler_core.graph.annotation import Annotation
from superscaler_core.graph.builder import GraphBuilder
from superscaler_core.graph.invocation import Invocation
from superscaler_core.graph.tensor import CONSTANT, ITEM_BYTES, PARAMETER, PTensor
from superscaler_core.quoted import literal as source_of
from superscaler_core.rules import aten
from superscaler_core.rules.records import Node, TracedValue, leaves_of

_KEPT_ANYWAY = (PARAMETER, CONSTANT)

_NAMES = ("b", "s", "h", "d", "e", "f", "g", "i")


class NoRuleError(Exception):
    """No rule covers a call."""


@dataclass(frozen=True)
class RuleCall:
    """One traced call, whose tensor arguments are tensors of the graph.

    Attributes:
        node: the call.
        args: its arguments by name.
        builder: the builder of the graph.
        is_known: whether a tensor is a constant whose value has a property, given as a function of
            the value; if so, the graph may depend on it, and no other value can be loaded later.
    """

    node: Node
    args: dict[str, Any]
    builder: GraphBuilder
    is_known: Callable[[PTensor, Callable[[Tensor], bool]], bool]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that some overloads lack."""
        return self.args.get(name, default)

    def other(self, target: str, args: Mapping[str, Any], *shapes: Sequence[int]) -> RuleCall:
        """A call of another op in place of this one; its results have these shapes."""
        values = (TracedValue(tuple(shape), self.node.outputs[0].dtype) for shape in shapes)
        node = aten.call(self.node, self.node.name, target, args, *values)
        return replace(self, node=node, args=dict(node.args))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        return self.node.outputs[0].shape

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every result."""
        return [(value.shape, value.dtype) for value in self.node.outputs]

    @property
    def kind(self) -> str:
        """The plain name of the called function: ``softmax`` for ``aten.softmax.int``."""
        return self.node.base.rpartition(".")[2].strip("_")

    @property
    def tensors(self) -> list[PTensor]:
        """All tensors among the arguments, in order, with repetitions."""
        return [leaf for leaf in leaves_of(self.args) if isinstance(leaf, PTensor)]

    def given(self, *names: str) -> dict[str, PTensor]:
        """The tensors among optional arguments, by name."""
        return {name: self.args[name] for name in names if self.args.get(name) is not None}

    def op(
        self,
        kind: str,
        annotation: str,
        inputs: Sequence[PTensor],
        code: str | Invocation,
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        saves: Sequence[int] | None = None,
        flops: float | None = None,
        differentiable: bool = True,
        sizes: Mapping[str, int] | None = None,
    ) -> PTensor:
        """Add an op with one result; by default it has the call's shape and dtype.

        ``saves`` is as in ``graph.Op``. Parameters and constants are removed from it here, and all
        entries if no gradient flows.

        ``flops`` are the floating-point operations of the op's whole forward; if None, one for each
        element of its largest tensor. They depend only on shapes, not on how many loops the
        annotation has: a graph spreads them evenly over the iterations of all loops.
        """
        value = self.node.outputs[0]
        output = (value.shape if shape is None else tuple(shape), dtype or value.dtype)
        return self.op_of_many(
            kind, annotation, inputs, code, [output],
            saves=saves, flops=flops, differentiable=differentiable, sizes=sizes,
        )[0]  # fmt: skip

    def op_of_many(
        self,
        kind: str,
        annotation: str,
        inputs: Sequence[PTensor],
        code: str | Invocation,
        outputs: Sequence[tuple[Sequence[int], str]],
        *,
        saves: Sequence[int] | None = None,
        flops: float | None = None,
        differentiable: bool = True,
        num_grads: int | None = None,
        sizes: Mapping[str, int] | None = None,
        imports: Sequence[str] = (),
        hint: str = "",
        modules: Sequence[str] = (),
    ) -> tuple[PTensor, ...]:
        """Add an op with several results; otherwise like ``op``."""
        for dtype in (*(t.dtype for t in inputs), *(dtype for _, dtype in outputs)):
            if dtype not in ITEM_BYTES:
                raise self.refusal(
                    f"tensors of {dtype} are not supported; use {', '.join(ITEM_BYTES)}."
                )
        grad = differentiable and any(map(self.builder.has_grad, inputs))
        if grad and not self.node.with_grad:
            grad = False
            each = f"tuple(x.detach() for x in {code})"
            code = f"({code}).detach()" if len(outputs) == 1 else each
        wanted = range(len(inputs)) if saves is None else saves
        kept = [i for i in wanted if i >= len(inputs) or inputs[i].kind not in _KEPT_ANYWAY]
        shapes = [t.shape for t in inputs], [tuple(shape) for shape, _ in outputs]
        total = largest(*shapes) if flops is None else flops
        marked = Annotation.parse(annotation)
        per_iteration = total / iterations(marked, *shapes, sizes)
        return self.builder.op(
            kind, marked, inputs, outputs, code, module=self.node.module,
            saves=kept if grad else (), flops=per_iteration,
            differentiable=grad, num_grads=num_grads, sizes=sizes, imports=imports, hint=hint,
            modules=modules,
        )  # fmt: skip

    def each(self, kind: str, x: PTensor, code: str, **more: Any) -> PTensor:
        """Add an op that computes each element from the element of ``x`` at its position.

        ``more`` are as in ``op``; by default it keeps nothing for the backward.
        """
        dims = text(names(len(x.shape)))
        more = {"shape": x.shape, "saves": (), **more}
        return self.op(kind, f"{dims} -> {dims}", (x,), code, **more)

    def without_grad(self, x: PTensor) -> PTensor:
        """The same tensor, without gradient."""
        more: dict[str, Any] = {"dtype": x.dtype, "differentiable": False, "flops": 0.0}
        return self.each("detach", x, "{x0}.detach()", **more)

    def written(self, template: str, inputs: Sequence[PTensor]) -> str:
        """Fill the call's arguments into a template such as ``F.gelu({self})``."""
        names = [field for _, field, _, _ in Formatter().parse(template) if field]
        return template.format(**{n: literal(self.args[n], inputs) for n in names})

    def fallback(self, inputs: Sequence[PTensor]) -> str:
        """The call as it was traced, such as ``torch.ops.aten.elu.default({x0}, 1.0)``."""
        words: list[str] = []
        by_name = False
        given = dict(self.node.given)
        for name, value in self.args.items():
            # After an omitted argument, the others are passed by name.
            by_name = by_name or given.get(name, True)
            if name in given and name not in ("device", "layout", "pin_memory"):
                words.append(f"{name}=" * by_name + literal(value, inputs))
        return f"torch.ops.{self.node.target}({', '.join(words)})"

    def error(self, why: str) -> NoRuleError:
        """The error to raise if a rule does not cover the call; it then becomes an opaque op."""
        return NoRuleError(self._message(why))

    def refusal(self, why: str) -> CaptureError:
        """The error to raise if the call cannot be a part of a graph."""
        return CaptureError(self._message(why))

    def _message(self, why: str) -> str:
        shapes = ", ".join(map(str, self.tensors)) or "no tensor"
        return f"{self.node.target} in {self.node.place}, of {shapes}: {why}"


def fields(count: int) -> str:
    """The fields of inputs in a code template: ``{x0}, {x1}``."""
    return ", ".join(f"{{x{i}}}" for i in range(count))


def by_name(weights: Iterable[str]) -> list[str]:
    """Keyword arguments for the inputs after the first: ``weight={x1}``, ``bias={x2}``."""
    return [f"{name}={{x{i}}}" for i, name in enumerate(weights, 1)]


def literal(value: Any, inputs: Sequence[PTensor]) -> str:
    """A value as Python text in a code template; a tensor as the field of its position.

    >>> literal([1, float("-inf"), None], [])
    '[1, float("-inf"), None]'
    """
    if isinstance(value, PTensor):
        position = next(i for i, t in enumerate(inputs) if t is value)
        return f"{{x{position}}}"
    if isinstance(value, list):
        return f"[{', '.join(literal(v, inputs) for v in value)}]"
    return source_of(value)


def names(rank: int) -> list[str]:
    """Identifiers for the dims of a tensor, outermost first."""
    return [*_NAMES[:rank], *(f"d{i}" for i in range(len(_NAMES), rank))]


def text(dims: Iterable[str]) -> str:
    """Dims as one operand of an annotation."""
    return " ".join(dims) or "()"


def broadcast_to(shape: Sequence[int], dims: Sequence[str], sizes: Sequence[int]) -> str:
    """The operand of a tensor of this shape that broadcasts to dims of these sizes.

    >>> broadcast_to((1, 5), ["b", "s", "h"], (2, 3, 5))
    '1 h'
    """
    skipped = len(dims) - len(shape)
    pairs = zip(dims[skipped:], shape, sizes[skipped:], strict=True)
    return text("1" if size != wanted else dim for dim, size, wanted in pairs)


def dim_of(dim: int, rank: int) -> int:
    """The number of a dim, counted from the front; ``dim`` may be negative."""
    return dim % max(rank, 1)


def dims_of(dims: Any, rank: int) -> list[int]:
    """Dims of a reduction, counted from the front and sorted; all if none are given.

    A scalar has no dim, though torch lets a reduction name dim 0 of it.
    """
    if dims is None or dims == [] or not rank:
        return list(range(rank))
    return sorted(dim_of(d, rank) for d in (dims if isinstance(dims, list) else [dims]))


def fixed(dims: Sequence[str], which: Iterable[int]) -> list[str]:
    """The dims, with those at ``which`` marked as fixed."""
    chosen = set(which)
    return [f"{d}^" if i in chosen else d for i, d in enumerate(dims)]


def share(loops: Sequence[str], count: int) -> str:
    """Code of the local share of ``count`` iterations, the factor from a local mean to a summand.

    So no intermediate value is a sum over all iterations, which could overflow in half precision.
    """
    here = " * ".join(f"{{size[{i}]}}" for i in loops) or "1"
    return f"({here} / {count})"


def largest(*sides: Iterable[Sequence[int]]) -> int:
    """Elements of the largest tensor, given the shapes of inputs and outputs; at least 1."""
    return max(1, *(prod(shape) for side in sides for shape in side))


def iterations(
    annotation: Annotation,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int] | None = None,
) -> int:
    """Iterations of all loops together; at least 1. The arguments are those of its ``sizes``."""
    return max(1, prod(annotation.sizes(inputs, outputs, sizes).values()))
