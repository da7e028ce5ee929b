"""Groups: sets of ops that are cut together, by one decision."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.dims import Dims
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import ACTIVATION, INPUT, PARAMETER, PTensor

OpGroup = tuple[Op, ...]


def decides(op: Op) -> bool:
    """Whether an op sums over a loop that two operands or a parameter have, as a linear map does.

    If it is cut along that loop, its result is a partial sum, so its readers may need another
    layout than the one that is written. All other ops *follow* the ops whose results they read. An
    op that reads only weights and constants, such as a table of positions, does not decide.
    """
    if not any(tensor.kind in (ACTIVATION, INPUT) for tensor in op.inputs):
        return False
    operands = list(zip(op.inputs, op.annotation.inputs, strict=True))
    for loop in filter(op.is_splittable, op.annotation.reductions):
        kinds = [
            tensor.kind
            for tensor, dims in operands
            if any(isinstance(dim, tuple) and loop in dim for dim in dims)
        ]
        if len(kinds) > 1 or PARAMETER in kinds:
            return True
    return False


def groups_of(graph: Graph, run: Sequence[Op]) -> tuple[OpGroup, ...]:
    """The groups of a run of consecutive ops, such as a block; each op is in exactly one group.

    - Ops that decide, have equal forms and read the same activations form one group: queries, keys
      and values, or a gate and the projection that it multiplies.
    - An op that follows joins the group of the last op whose result it reads. But ops that directly
      follow a group that decides form one group of their own.
    - An op that follows, but depends on no deciding op of this run, such as a norm at the start of
      a block or a table of positions, joins the group of its reader, if that is the only reader and
      follows too. Otherwise it begins a group.

    Args:
        graph: the graph of the ops.
        run: the ops, in the graph's order.
    """
    inside = set(run)
    leader: dict[Op, Op] = {}
    siblings: dict[object, Op] = {}
    behind: dict[Op, Op] = {}
    for op in run:
        made = [graph.producer[t] for t in op.inputs if graph.producer.get(t) in inside]
        # Ops without a leader depend on no deciding op of this run.
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
    """A key that is equal for groups with equal choices and equal costs.

    Groups with equal keys have equal ops. In both, the same inputs are one tensor, the same results
    are read by other groups, and the same loops belong to one class.
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
