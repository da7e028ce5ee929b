"""LayoutProblem: ops over tensors with named dims, for which a layout on a mesh is searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import prod

from superscaler_core.plan.mesh import Mesh


@dataclass(frozen=True, slots=True)
class MeshTensor:
    """A tensor of named dims.

    Attributes:
        dims: the dims that may be cut.
        num_bytes: bytes of the whole tensor.
        stays: whether it is held to the end of the step.
    """

    dims: frozenset[str]
    num_bytes: float
    stays: bool = False


@dataclass(frozen=True, slots=True)
class MeshOp:
    """An op: tensors that it reads and writes, and dims that only it has."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    dims: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class LayoutProblem:
    """Ops over tensors with named dims, and a mesh.

    Attributes:
        mesh: the mesh of devices.
        sizes: for every dim that may be cut, all sizes that it has in different ops.
        tensors: by name; each is written by one op.
        ops: in an order that follows the data flow.
    """

    mesh: Mesh
    sizes: Mapping[str, frozenset[int]]
    tensors: Mapping[str, MeshTensor]
    ops: tuple[MeshOp, ...]

    @cached_property
    def op_dims(self) -> tuple[frozenset[str], ...]:
        """The sets of dims that ops have, each once."""
        sets = (
            op.dims.union(*(self.tensors[t].dims for t in (*op.reads, *op.writes)))
            for op in self.ops
        )
        return tuple(dict.fromkeys(sets))

    def divides(self, dim: str, side: str) -> bool:
        """Whether a dim can be cut along a side."""
        return all(size % self.mesh.sizes[side] == 0 for size in self.sizes[dim])

    def allows(self, layout: Mapping[str, str]) -> bool:
        """Whether no side cuts two dims of one op, and each side divides the dims that it cuts."""
        alone = all(
            len({layout[dim] for dim in dims if dim in layout}) == len(dims & layout.keys())
            for dims in self.op_dims
        )
        return alone and all(self.divides(dim, side) for dim, side in layout.items())

    def bytes_of(self, tensor: str, layout: Mapping[str, str]) -> float:
        """Bytes of a device's part of a tensor."""
        of = self.tensors[tensor]
        return of.num_bytes / prod(self.mesh.sizes[layout[d]] for d in of.dims if d in layout)

    def peak_bytes(self, layout: Mapping[str, str]) -> float:
        """The most bytes that a device holds at once."""
        return max(sum(self.bytes_of(t, layout) for t in alive) for alive in self.contents)

    @cached_property
    def contents(self) -> tuple[frozenset[str], ...]:
        """The tensors that are alive while each op runs, in the order of the list schedule."""
        left = Counter(t for op in self.ops for t in set(op.reads))
        left.update(name for name, tensor in self.tensors.items() if tensor.stays)
        alive: set[str] = set()
        found = []
        for number in list_schedule(self):
            op = self.ops[number]
            alive.update(op.writes)
            found.append(frozenset(alive))
            left.subtract(set(op.reads))
            alive.difference_update(t for t in (*op.reads, *op.writes) if left[t] == 0)
        return tuple(found)


def list_schedule(problem: LayoutProblem) -> list[int]:
    """An order of the ops in which the next one always frees most bytes, of those that can run."""
    users: dict[str, set[int]] = {name: set() for name in problem.tensors}
    for number, op in enumerate(problem.ops):
        for tensor in op.reads:
            users[tensor].add(number)
    waits = [len(set(op.reads)) for op in problem.ops]

    def freed(number: int) -> float:
        op, of = problem.ops[number], problem.tensors
        ends = (t for t in set(op.reads) if users[t] == {number} and not of[t].stays)
        needed = (t for t in op.writes if users[t] or of[t].stays)
        return sum(of[t].num_bytes for t in ends) - sum(of[t].num_bytes for t in needed)

    ready = [(-freed(number), number) for number in range(len(waits)) if not waits[number]]
    heapify(ready)
    order: list[int] = []
    done: set[int] = set()
    while ready:
        _, number = heappop(ready)
        if number in done:
            continue
        done.add(number)
        order.append(number)
        op = problem.ops[number]
        for tensor in op.writes:
            for user in users[tensor]:
                waits[user] -= 1
                if not waits[user]:
                    heappush(ready, (-freed(user), user))
        for tensor in set(op.reads):
            users[tensor].discard(number)
            # The last reader of a tensor frees more now; its older entry is skipped above.
            for last in users[tensor] if len(users[tensor]) == 1 else ():
                if not waits[last]:
                    heappush(ready, (-freed(last), last))
    return order
