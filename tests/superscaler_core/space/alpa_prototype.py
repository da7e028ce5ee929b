"""The cost model of Alpa's prototype of its intra-op planner, and its test models (MLPs).

Costs are in the prototype's own units, not in seconds. The spec of a tensor has, for each dim, the
axis of a 2-D mesh that splits the dim, or None. Source of all rules: Alpa's folder
``playground/auto_sharding_solver`` (``cluster_env.py``, ``hlo.py``, ``test_solver_mlp.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from math import inf

import numpy as np

from superscaler_core.space import Space, SpaceEdge, SpaceNode

Spec = tuple[int | None, ...]


@dataclass(frozen=True)
class Mesh:
    """A mesh of two axes, with the prototype's communication costs along them.

    Attributes:
        sizes: number of devices along each axis.
        beta: cost of a byte along each axis; a message costs 1.
    """

    sizes: tuple[int, int]
    beta: tuple[float, float] = (1.0, 1.0)

    def _cost(self, axis: int, factor: float, num_bytes: float, penalty: float) -> float:
        size = self.sizes[axis]
        return int(1 + self.beta[axis] * factor * (size - 1) / size * num_bytes) + penalty

    def all_gather(self, num_bytes: float, axis: int) -> float:
        """The cost of an all-gather; ``num_bytes`` is the size of the whole tensor."""
        return self._cost(axis, 1.0, num_bytes, 0.1)

    def all_reduce(self, num_bytes: float, axis: int) -> float:
        """The cost of an all-reduce; ``num_bytes`` is the size of the tensor on each device."""
        return self._cost(axis, 2.0, num_bytes, 0.01)

    def all_to_all(self, num_bytes: float, axis: int) -> float:
        """The cost of an all-to-all; ``num_bytes`` is the size of the whole tensor."""
        return self._cost(axis, 1.5 / self.sizes[axis], num_bytes, 0.001)

    def spec(self, num_dims: int, axes: dict[int, int]) -> Spec:
        """The spec of a tensor, from ``{dim: axis}``; axes of one device split no dim."""
        splits = (axes.get(dim) for dim in range(num_dims))
        return tuple(None if axis is None or self.sizes[axis] == 1 else axis for axis in splits)

    def num_parts(self, spec: Spec) -> int:
        """The number of different parts of a tensor."""
        return int(np.prod([self.sizes[axis] for axis in spec if axis is not None]))

    def reshard(self, num_bytes: float, src: Spec, dst: Spec) -> float:
        """The cost of removing every split that the reader does not have.

        A split is removed by an all-to-all if dst splits another dim along the same axis, and
        otherwise by an all-gather.
        """
        return sum(
            (self.all_to_all if axis in dst else self.all_gather)(num_bytes, axis)
            for axis, wanted in zip(src, dst, strict=True)
            if axis is not None and axis != wanted
        )


@dataclass(eq=False)
class Prototype:
    """A builder of a space by the rules of the prototype; a value is the number of its node."""

    mesh: Mesh
    nodes: list[SpaceNode] = field(default_factory=list)
    edges: list[SpaceEdge] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    specs: list[list[Spec]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @property
    def space(self) -> Space:
        """The space that was built."""
        return Space(tuple(self.nodes), tuple(self.edges), memory_bytes=1000 * 2.0**20)

    def num_bytes(self, node: int) -> int:
        """Bytes of a whole value, with 4 bytes per element."""
        return 4 * int(np.prod(self.shapes[node]))

    def _node(self, kind: str, shape: tuple[int, int], ways: list[tuple[Spec, float]]) -> int:
        number = len(self.nodes)
        specs = [spec for spec, _ in ways]
        self.shapes.append(shape)
        self.specs.append(specs)
        self.depths.append(0)
        whole = self.num_bytes(number)
        self.nodes.append(
            SpaceNode.of(
                f"{kind}{number}",
                map(str, specs),
                forward_secs=[cost for _, cost in ways],
                resting_bytes=[whole / self.mesh.num_parts(spec) for spec in specs],
            )
        )
        return number

    def _reads(self, reader: int, writer: int, wanted: list[Spec]) -> None:
        """Add an edge: for each choice of ``reader``, ``wanted`` has the spec of the value read."""
        size = self.num_bytes(writer)
        costs = [[self.mesh.reshard(size, a, b) for b in wanted] for a in self.specs[writer]]
        self.edges.append(SpaceEdge.of(writer, reader, costs))
        self.depths[reader] = max(self.depths[reader], self.depths[writer] + 1)

    def parameter(self, shape: tuple[int, int]) -> int:
        """Add an input: one dim split along one axis, or replicated at cost 2."""
        axes = [axis for axis in (0, 1) if self.mesh.sizes[axis] > 1]
        splits = [(self.mesh.spec(2, {dim: axis}), 0.0) for dim in (0, 1) for axis in axes]
        return self._node("parameter", shape, [*splits, ((None, None), 2.0)])

    def constant(self, shape: tuple[int, int]) -> int:
        """Add a broadcast number, which is replicated."""
        return self._node("constant", shape, [((None, None), 0.0)])

    def elementwise(self, *operands: int) -> int:
        """Add an elementwise op with the spec of its deepest operand; the others are resharded."""
        followed = max(operands, key=lambda each: self.depths[each])
        specs = self.specs[followed]
        node = self._node("elementwise", self.shapes[followed], [(spec, 0.0) for spec in specs])
        for operand in operands:
            if operand != followed:
                self._reads(node, operand, specs)
        never = np.where(np.eye(len(specs)) > 0, 0.0, inf)
        self.edges.append(SpaceEdge.of(followed, node, never))
        self.depths[node] = self.depths[followed] + 1
        return node

    def dot(self, left: int, right: int, *, left_sum: int = 1, right_sum: int = 0) -> int:
        """Add a product that sums over one dim of each operand.

        The two mesh axes split two of its three loops.
        """
        mesh, left_free, right_free = self.mesh, 1 - left_sum, 1 - right_sum
        shape = self.shapes[left][left_free], self.shapes[right][right_free]
        whole = 4 * shape[0] * shape[1]
        ways, lefts, rights = [], [], []
        for loops in (("left", "right"), ("left", "sum"), ("sum", "right")):
            for axes in permutations((0, 1)):
                axis_of = dict(zip(loops, axes, strict=True))
                summed = axis_of.get("sum")
                # A sum along an axis of one device is no split. If the mesh is a line, the ways
                # ("left", "sum") already contain this sum.
                is_line = 1 in mesh.sizes and loops[0] == "sum"
                if summed is not None and (mesh.sizes[summed] == 1 or is_line):
                    continue
                spec = mesh.spec(2, _of(axis_of, left=0, right=1))
                part = whole / mesh.num_parts(spec)
                ways.append((spec, 0.0 if summed is None else mesh.all_reduce(part, summed)))
                lefts.append(mesh.spec(2, _of(axis_of, left=left_free, sum=left_sum)))
                rights.append(mesh.spec(2, _of(axis_of, right=right_free, sum=right_sum)))
        node = self._node("dot", shape, ways)
        self._reads(node, left, lefts)
        self._reads(node, right, rights)
        return node

    def alias(self, a: int, b: int) -> None:
        """Require that two values, which share a buffer, have the same spec."""
        never = [[0.0 if x == y else inf for y in self.specs[b]] for x in self.specs[a]]
        self.edges.append(SpaceEdge.of(a, b, never))


def _of(axes: dict[str, int], **dims: int) -> dict[int, int]:
    """The axes of a tensor's dims, from the axes of loops; ``dims`` has the dim of each loop."""
    return {dim: axes[loop] for loop, dim in dims.items() if loop in axes}


def mlp(mesh: Mesh, num_layers: int, batch: int, width: int) -> Space:
    """The space of a training step of a linear MLP: forward, squared error, gradients, updates."""
    build = Prototype(mesh)
    x, y = build.parameter((batch, width)), build.parameter((batch, width))
    weights = [build.parameter((width, width)) for _ in range(num_layers)]
    hidden = [x]
    for weight in weights:
        hidden.append(build.dot(hidden[-1], weight))
    error = build.elementwise(hidden[-1], y)
    grad = build.elementwise(error, build.constant((batch, width)))
    for number in range(num_layers - 1, -1, -1):
        of_weight = build.dot(hidden[number], grad, left_sum=0, right_sum=0)
        build.alias(weights[number], build.elementwise(weights[number], of_weight))
        if number:
            grad = build.dot(grad, weights[number], left_sum=1, right_sum=1)
    return build.space
