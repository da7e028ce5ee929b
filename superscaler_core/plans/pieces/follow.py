"""Follow: which loop of every op a dim of what a module reads becomes inside the module.

``plan.dims`` cannot tell: where a pair (i, j) is of residues, both its dims are one class.
"""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.annotation import Operand
from superscaler_core.graph.graph import Op
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.graph.tensor import ACTIVATION, INPUT, PTensor


def followed(ops: Sequence[Op], first: int, then: int) -> dict[Op, str]:
    """Loops that cut a module's ops along one dim of what it reads.

    An op that sees the dim as one loop is cut along that. Where two of its inputs bring a loop
    each, as left and right of a triangular product do, the one is taken that is the dim of the
    module's result; the other input has to be whole there.

    Args:
        ops: of the module, in order.
        first: dim of the tensor that it reads first.
        then: dim of all others that it reads, and of its results.

    Returns:
        By op the loop; one that does not see the dim is not there.
    """
    loops = _seen(ops, first, then)
    inside = {tensor for op in ops for tensor in op.outputs}
    wanted: dict[PTensor, int] = {}
    chosen: dict[Op, str] = {}
    # Backward from the results; what nobody asked for a dim of is a result, or read whole.
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
    """The loop that is cut where a dim of an operand is; None if it has no such dim."""
    found = operand[dim] if dim < len(operand) else ()
    if isinstance(found, SlidingWindow):
        return found.loop
    return next((i for i in found if op.sizes[i] > 1), None)
