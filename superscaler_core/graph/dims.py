"""Dims: which dims of a model's tensors belong together, such as the batch, or a layer's heads.

An op ties the dims that share an identifier; the ties through the whole graph give classes of dims
and loops. GSPMD propagates splits along these ties; here a plan looks the classes up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from superscaler_core.errors import PlanError
from superscaler_core.graph.annotation import loops_of
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.once import once_per_graph
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.graph.tensor import PTensor

Node = tuple[str | int, str | int]
"""A dim ``(tensor name, dim)`` or a loop ``(op index, identifier)``."""


@dataclass(frozen=True, slots=True, order=True)
class DimClass:
    """A class of dims and loops that are tied together, named after its first dim."""

    tensor: str
    dim: int

    def __str__(self) -> str:
        return f"{self.tensor}.{self.dim}"


@dataclass(frozen=True, eq=False)
class Dims:
    """The classes of a graph's dims."""

    graph: Graph

    def of(self, tensor: str, dim: int) -> DimClass:
        """The class of dim ``dim`` of an input, parameter or activation.

        Raises:
            PlanError: there is no such tensor, or it has fewer dims.
        """
        name = self.graph.aliases.get(tensor, tensor)
        found = self._classes.get((name, dim))
        if found is None:
            raise PlanError(
                f"{self.graph.name} has no dim {dim} of a tensor {tensor!r}; parameters are named "
                "as in its state_dict, inputs as the arguments of its forward."
            )
        return found

    def of_params(self, *patterns: tuple[str, int]) -> frozenset[DimClass]:
        """Classes of parameter dims: each pattern is a name with wildcards, and a dim.

        Raises:
            PlanError: a pattern matches no parameter.
        """
        found: set[DimClass] = set()
        for pattern, dim in patterns:
            names = [n for n in self.graph.parameters if fnmatchcase(n, pattern)]
            if not names:
                raise PlanError(f"{self.graph.name} has no parameter that fits {pattern!r}.")
            found |= {self.of(name, dim) for name in names}
        return frozenset(found)

    @cached_property
    def batch(self) -> DimClass:
        """The class of the samples of the first input that has any."""
        found = ((t.name, self.graph.samples_dim(t)) for t in self.graph.inputs)
        name, dim = next((x for x in found if x[1] is not None), (self.graph.inputs[0].name, 0))
        return self.of(name, dim or 0)

    def samples_dim(self, tensor: PTensor) -> int | None:
        """The dim of an activation that has the samples of the batch; None if there is none.

        It is tied to the samples of an input. If no dim is, because the batch is a single sample or
        an opaque op ties none, it is the first dim that is not tied to another dim of an input or a
        parameter, and is dim 0 or as long as the batch.
        """
        of_inputs = ((t, self.graph.samples_dim(t)) for t in self.graph.batch_inputs)
        inputs = [(t, dim) for t, dim in of_inputs if dim is not None]
        batch = {self.of(t.name, dim) for t, dim in inputs}
        classes = [self._classes.get((tensor.name, dim)) for dim in range(len(tensor.shape))]
        for dim, of in enumerate(classes):
            if of in batch:
                return dim
        sizes = {t.shape[dim] for t, dim in inputs}
        for dim, of in enumerate(classes):
            is_free = of is None or of.tensor not in self._given
            if is_free and (dim == 0 or tensor.shape[dim] in sizes):
                return dim
        return None

    @cached_property
    def _given(self) -> frozenset[str]:
        """The names of inputs and parameters, which name all classes that they are in."""
        return frozenset({*(t.name for t in self.graph.inputs), *self.graph.parameters})

    def of_tensor(self, tensor: PTensor) -> tuple[DimClass, ...]:
        """The distinct classes of a tensor's dims with more than one element."""
        found = self._of_tensors.get(tensor.name)
        if found is None:
            nodes = ((tensor.name, dim) for dim in range(len(tensor.shape)))
            found = tuple(dict.fromkeys(self._classes[n] for n in nodes if n in self._classes))
            self._of_tensors[tensor.name] = found
        return found

    @cached_property
    def _of_tensors(self) -> dict[str, tuple[DimClass, ...]]:
        """Results of ``of_tensor`` so far, by the tensor's name."""
        return {}

    def of_loop(self, op: Op, identifier: str) -> DimClass:
        """The class of a loop of an op."""
        return self._classes[op.index, identifier]

    def sizes(self, of: DimClass) -> Mapping[int, Op]:
        """The sizes of a class' loops that can be cut, each with the first op that has the size."""
        return self._sizes.get(of, {})

    def can_cut(self, of: DimClass, num: int) -> bool:
        """Whether all loops of a class can be cut into ``num`` parts at the same places.

        Loops of one size are cut alike into any number. Of several sizes, each has to be divisible;
        or it divides ``num``, so that parts share iterations, unless a product or the batch has it.
        """
        sizes = self.sizes(of)
        if len(sizes) == 1:
            return num <= min(sizes)
        whole = sizes.keys() if of == self.batch else self._sizes_of_products.get(of, set())
        return all(size % num == 0 or (num % size == 0 and size not in whole) for size in sizes)

    def of_op(self, op: Op) -> Collection[DimClass]:
        """The classes of an op's loops that can be cut."""
        return self._loops[op.index].keys()

    def ids(self, op: Op, of: DimClass) -> tuple[str, ...]:
        """Loops of an op that belong to a class and can be cut."""
        return self._loops[op.index].get(of, ())

    @cached_property
    def _loops(self) -> tuple[Mapping[DimClass, tuple[str, ...]], ...]:
        """For each op its loops that can be cut, by class."""
        found: tuple[dict[DimClass, tuple[str, ...]], ...] = tuple({} for _ in self.graph.ops)
        for op, by_class in zip(self.graph.ops, found, strict=True):
            for identifier in filter(op.is_splittable, op.sizes):
                of = self._classes[op.index, identifier]
                by_class[of] = (*by_class.get(of, ()), identifier)
        return found

    @cached_property
    def _sizes(self) -> Mapping[DimClass, Mapping[int, Op]]:
        found: dict[DimClass, dict[int, Op]] = {}
        for op, by_class in zip(self.graph.ops, self._loops, strict=True):
            for of, ids in by_class.items():
                found.setdefault(of, {}).setdefault(op.sizes[ids[0]], op)
        return found

    @cached_property
    def _sizes_of_products(self) -> Mapping[DimClass, set[int]]:
        """The sizes of a class' loops in products, such as a linear map or attention."""
        found: dict[DimClass, set[int]] = {}
        for op, by_class in zip(self.graph.ops, self._loops, strict=True):
            if op.kind == "attention" or _is_product(op):
                for of, ids in by_class.items():
                    found.setdefault(of, set()).add(op.sizes[ids[0]])
        return found

    @cached_property
    def _classes(self) -> dict[Node, DimClass]:
        """The class of every dim (tensor name, dim) and of every loop (op index, identifier)."""
        parents: dict[Node, Node] = {}

        def root(node: Node) -> Node:
            path = []
            while (parent := parents.setdefault(node, node)) != node:
                path.append(node)
                node = parent
            for passed in path:
                parents[passed] = node
            return node

        for tensor in (*self.graph.inputs, *self.graph.parameters.values()):
            for dim in range(len(tensor.shape)):
                root((tensor.name, dim))
        for op in self.graph.ops:
            for identifier in op.sizes:
                root((op.index, identifier))
            tensors = (*op.inputs, *op.outputs)
            for tensor, operand in zip(tensors, op.annotation.operands, strict=True):
                for dim, ids in enumerate(operand):
                    # Cutting a dim means cutting its outermost loop, or the loop of its window.
                    loops = (ids.loop,) if isinstance(ids, SlidingWindow) else ids
                    outer = next((i for i in loops if op.sizes[i] > 1), None)
                    if outer is not None:
                        # The dim stays the root, so that a class is named after its first dim.
                        first, then = root((tensor.name, dim)), root((op.index, outer))
                        parents[then] = first
        names: dict[Node, DimClass] = {}
        for node in parents:
            names.setdefault(root(node), _named(node))
        return {node: names[root(node)] for node in parents}


@once_per_graph
def dims_of(graph: Graph) -> Dims:
    """The classes of a graph's dims; all callers share one object."""
    return Dims(graph)


def _is_product(op: Op) -> bool:
    """Whether the op sums over a loop that two inputs share."""
    held = [*map(loops_of, op.annotation.inputs)]
    return any(sum(loop in loops for loops in held) > 1 for loop in op.annotation.reductions)


def _named(node: Node) -> DimClass:
    """The class that is named after a tensor's dim, or after a loop that no dim is tied to."""
    where, which = node
    if isinstance(where, str) and isinstance(which, int):
        return DimClass(where, which)
    return DimClass(f"op {where} {which}", 0)
