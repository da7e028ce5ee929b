"""Follow: traces a dim of a module's inputs to the loops of the ops inside the module.

``plan.dims`` cannot tell: in a pair (i, j) of residues, both dims are of one class.
"""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.annotation import Operand
from superscaler_core.graph.graph import Op
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.graph.tensor import ACTIVATION, INPUT, PTensor


def followed(ops: Sequence[Op], first: int, then: int) -> dict[Op, str]:
    """The loops that cut a module's ops along one dim of its inputs.

    An op in which the dim is one loop is cut along this loop. If two inputs bring a loop each, as
    the two sides of a triangular product do, the loop that becomes the dim of the module's result
    is taken; the other input has to be whole.

    Args:
        ops: the ops of the module, in order.
        first: dim of the tensor that the module reads first.
        then: dim of all its other inputs, and of its results.

    Returns:
        The loop of every op; ops without the dim are left out.
    """
    loops = _seen(ops, first, then)
    inside = {tensor for op in ops for tensor in op.outputs}
    wanted: dict[PTensor, int] = {}
    chosen: dict[Op, str] = {}
    # Backward from the results. A tensor without a wanted dim is a result, or is read whole.
    for op in reversed(ops):
        asked = [
            _loop(op, operand, wanted.get(tensor, then))
            for tensor, operand in zip(op.outputs, op.annotation.outputs, strict=True)
        ]
        if not loops[op]:
            continue
        chosen[op] = next((loop for loop in asked if loop in loops[op]), loops[op][0])
        for tensor, operand in zip(op.inputs, op.annotation.inputs, strict=True):
            dims = [d for d in range(len(operand)) if _loop(op, operand, d) == chosen[op]]
            if tensor in inside and dims:
                wanted.setdefault(tensor, dims[0])
    return chosen


def _seen(ops: Sequence[Op], first: int, then: int) -> dict[Op, list[str]]:
    """All loops of every op that the dim may become, those of its first input first."""
    inside = {tensor for op in ops for tensor in op.outputs}
    read = dict.fromkeys(t for op in ops for t in op.inputs if t.kind in (ACTIVATION, INPUT))
    outside = [tensor for tensor in read if tensor not in inside]
    dims = {tensor: [then if i else first] for i, tensor in enumerate(outside)}
    loops: dict[Op, list[str]] = {}
    for op in ops:
        found = (
            _loop(op, operand, dim)
            for tensor, operand in zip(op.inputs, op.annotation.inputs, strict=True)
            for dim in dims.get(tensor, ())
        )
        loops[op] = list(dict.fromkeys(i for i in found if i and op.is_splittable(i)))
        for tensor, operand in zip(op.outputs, op.annotation.outputs, strict=True):
            dims[tensor] = [d for d in range(len(operand)) if _loop(op, operand, d) in loops[op]]
    return loops


def _loop(op: Op, operand: Operand, dim: int) -> str | None:
    """The loop of an operand's dim; None if the operand has no such dim."""
    found = operand[dim] if dim < len(operand) else ()
    if isinstance(found, SlidingWindow):
        return found.loop
    return next((i for i in found if op.sizes[i] > 1), None)
