"""Mesh-TensorFlow's layout optimizer: which dims to cut along which sides of a mesh, for memory.

Objective: z is the most bytes that a device holds at once, over a list schedule of the ops. x is 1
for every dim and side along which the dim is cut. With D dims,

    min  (D + 1) z - sum of x

so the least memory comes first and, among equal ones, the layout that cuts most dims. Every dim is
cut along one side at most, and only if all its sizes are multiples of the side. No two dims of an
op are cut along the same side. For every set of dims that a tensor has, ``y`` says which assignment
of these dims to sides holds. z is at least the bytes of all tensors alive at any time, each by its
y.

Complexity: an integer programme of ``O(T A)`` variables, with T sets of dims that a tensor has and
A assignments of one set. A time is left out if at another time every set has at least as many
bytes. The result is exact for the given schedule.

Differences from the published code (``auto_mtf/layout_optimizer.py``): HiGHS replaces CP-SAT.
Memory and ties are two programmes, one after the other: for whole numbers this is the same, and no
tie is lost to rounding among gigabytes. The schedule is the same greedy one: next is the op that
frees most bytes. The tensors of a step follow from the model's forward: backward ops read what
autograd saves; weights with gradients and optimizer states exist all the time.

Source: Shazeer et al., Mesh-TensorFlow, NeurIPS 2018; ``auto_mtf`` in its repository.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations
from math import inf, prod

import numpy as np

from superscaler_core.integer_program import IntegerProgram
from superscaler_core.published.mesh_tf.mesh_layout import MeshLayout
from superscaler_core.published.mesh_tf.problem import LayoutProblem
from superscaler_core.space import Array

TOLERANCE = 1e-6
"""Tolerance by which HiGHS may violate a row, in units of the whole model's bytes."""


def assignments(dims: Iterable[str], sides: Sequence[str]) -> Iterator[dict[str, str]]:
    """All ways to cut some of the dims, each along a side of its own.

    >>> len(list(assignments(["s1", "s2", "s3"], ["m1", "m2"])))
    13
    """
    names = sorted(dims)
    for num in range(min(len(names), len(sides)) + 1):
        for chosen in combinations(names, num):
            for own in permutations(sides, num):
                yield dict(zip(chosen, own, strict=True))


def auto_mtf(problem: LayoutProblem) -> MeshLayout:
    """The layout of the least memory; of equal ones, the one that cuts most dims."""
    small = _solve(problem, cuts=0.0)
    # HiGHS's own figure may be below that of any layout, because an x may be not quite 1.
    least = problem.peak_bytes(dict(small.dims))
    return _solve(problem, cuts=1.0, most=least * (1 + TOLERANCE))


def _solve(problem: LayoutProblem, cuts: float, most: float = inf) -> MeshLayout:
    """The layout of least memory if ``cuts`` is 0, else the one of most cuts within ``most``."""
    program = IntegerProgram()
    sides = list(problem.mesh.sizes)
    times, sets = _bytes_by_dims(problem)
    unit = max(float(times.sum(axis=1).max()), 1.0)
    (z,) = program.variables(1, cost=0.0 if cuts else 1.0, most=min(most / unit, 1.0))
    x = {
        (dim, side): int(program.variables(1, cost=-cuts, is_whole=True, most=1.0)[0])
        for dim in sorted(problem.sizes)
        for side in sides
        if problem.divides(dim, side)
    }
    along = {dim: [v for (name, _), v in x.items() if name == dim] for dim in problem.sizes}
    for own in along.values():
        program.row(((v, 1.0) for v in own), most=1.0)
    for dims in problem.op_dims:
        for side in sides:
            program.row(((x[d, side], 1.0) for d in sorted(dims) if (d, side) in x), most=1.0)
    held: list[tuple[list[int], list[float]]] = []
    for dims in sets:
        ways = [way for way in assignments(dims, sides) if all(pair in x for pair in way.items())]
        y = program.variables(len(ways), most=1.0).tolist()
        program.row(((v, 1.0) for v in y), least=1.0, most=1.0)
        for v, way in zip(y, ways, strict=True):
            for dim in sorted(dims):
                if dim in way:
                    program.row([(v, 1.0), (x[dim, way[dim]], -1.0)], most=0.0)
                else:
                    program.row([(v, 1.0), *((other, 1.0) for other in along[dim])], most=1.0)
        shares = [1 / prod(problem.mesh.sizes[side] for side in way.values()) for way in ways]
        held.append((y, shares))
    for sizes in times:
        entries = [
            (v, size / unit * share)
            for size, (y, shares) in zip(sizes, held, strict=True)
            for v, share in zip(y, shares, strict=True)
            if size
        ]
        program.row([*entries, (z, -1.0)], most=0.0)
    found = program.solve()
    assert found is not None, "the layout that cuts nothing is always allowed"
    return MeshLayout(tuple(pair for pair, v in x.items() if found.values[v] > 0.5))


def _bytes_by_dims(problem: LayoutProblem) -> tuple[Array, list[frozenset[str]]]:
    """Bytes alive at the times that may be the fullest, ``[time, set of dims]``, and the sets."""
    sets = sorted({tensor.dims for tensor in problem.tensors.values()}, key=sorted)
    column = {dims: i for i, dims in enumerate(sets)}
    times = np.zeros((len(problem.contents), len(sets)))
    for time, alive in enumerate(problem.contents):
        for name in alive:
            times[time, column[problem.tensors[name].dims]] += problem.tensors[name].num_bytes
    kept: list[Array] = []
    for row in sorted(times, key=lambda row: -row.sum()):
        if not any((row <= other).all() for other in kept):
            kept.append(row)
    return np.array(kept), sets
