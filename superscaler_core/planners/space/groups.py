"""Groups: the ops of a model that one decision moves.

An op *decides* if it sums over a loop of two operands, or of a parameter: linear maps, lookups,
convolutions, products of activations. Cut along that loop, it gives partial sums, so its result may
be read in another layout than it was made in. All other ops follow what they read.
"""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.dims import Dims
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import ACTIVATION, INPUT, PARAMETER, PTensor

OpGroup = tuple[Op, ...]


def decides(op: Op) -> bool:
    """Whether an op has a loop of two operands, or of a parameter, that is summed over.

    An op that reads only weights and constants, such as a table of positions, does not decide.
    """
    if not any(tensor.kind in (ACTIVATION, INPUT) for tensor in op.inputs):
        return False
    operands = list(zip(op.inputs, op.annotation.inputs, strict=True))
    for loop in filter(op.is_splittable, op.annotation.reductions):
        kinds = [t.kind for t, dims in operands if any(loop in _loops(dim) for dim in dims)]
        if len(kinds) > 1 or PARAMETER in kinds:
            return True
    return False


def _loops(dim: object) -> tuple[str, ...]:
    return dim if isinstance(dim, tuple) else ()


def groups_of(graph: Graph, run: Sequence[Op]) -> tuple[OpGroup, ...]:
    """The groups of consecutive ops, such as a block; they are all of these ops, each once.

    - Ops that decide, have equal forms and read the same activations are one group: queries, keys
      and values, or a gate and what it opens.
    - An op that follows joins the group of the last op whose result it reads. If that op decides,
      all that follow its group directly are one group.
    - An op that follows and depends on no other op of this run, such as a norm at the start of a
      block or a table of positions, joins the group of its reader if that also follows and is the
      only one; otherwise it begins a group.

    Args:
        graph: of the ops.
        run: in the graph's order.
    """
    inside = set(run)
    leader: dict[Op, Op] = {}
    siblings: dict[object, Op] = {}
    behind: dict[Op, Op] = {}
    for op in run:
        made = [graph.producer[t] for t in op.inputs if graph.producer.get(t) in inside]
        # Those without a leader depend on nothing.
        known = [each for each in made if each in leader]
        if decides(op):
            read = tuple(t for t in op.inputs if t.kind != PARAMETER)
            leader[op] = siblings.setdefault((op.form, read), op)
        elif known:
            last = leader[max(known, key=lambda each: each.index)]
            leader[op] = behind.setdefault(last, op) if decides(last) else last
    for op in reversed(run):
        if op not in leader:
            readers = [r for t in op.outputs for r, _ in graph.readers.get(t, ()) if r in inside]
            joins = len(readers) == 1 and not decides(readers[0])
            leader[op] = leader[readers[0]] if joins else op
    found: dict[Op, list[Op]] = {}
    for op in run:
        found.setdefault(leader[op], []).append(op)
    return tuple(sorted(map(tuple, found.values()), key=lambda ops: ops[-1].index))


def likeness(dims: Dims, group: OpGroup) -> object:
    """Equal for groups that have equal choices with equal costs.

    These are groups of equal ops of which the same inputs are the same tensors, the same results
    are read outside, and the same loops are cut together.

    Args:
        dims: of the graph.
        group: ops of the graph.
    """
    graph, numbers = dims.graph, dict[PTensor, int]()
    inputs = tuple(numbers.setdefault(t, len(numbers)) for op in group for t in op.inputs)
    outputs = tuple(
        (numbers.get(t, -1), any(r not in group for r, _ in graph.readers.get(t, ())))
        for op in group
        for t in op.outputs
    )
    classes: dict[object, int] = {}
    loops = tuple(
        classes.setdefault(dims.of_loop(op, loop), len(classes))
        for op in group
        for loop in op.sizes
    )
    return tuple(op.form for op in group), inputs, outputs, loops
