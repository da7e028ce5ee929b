"""Halves: how the backward of a segment is split into I, for inputs, and W, for weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.materialize.segments import Segment

_FIRST_WEIGHT = {
    **dict.fromkeys(("linear", "matmul", "conv1d", "conv2d", "conv3d", "mul"), 1),
    **dict.fromkeys(("layer_norm", "group_norm"), 1),
    **dict.fromkeys(("embedding", "add_bias", "add", "to"), 0),
}
"""Kinds of ops for which W reads no weight, if no operand before this position is a weight."""


@dataclass(frozen=True, slots=True)
class HalvesOfOp:
    """Which operands of an op need gradients, by half.

    Attributes:
        op: the op.
        inputs: operands that depend on inputs of the segment: I computes their gradients.
        weights: operands that depend only on weights: W computes their gradients.
    """

    op: Op
    inputs: frozenset[PTensor]
    weights: frozenset[PTensor]


def halves_of(ops: Sequence[Op]) -> Iterator[HalvesOfOp]:
    """What each half does of each op of a segment; the run time splits the backward in the same
    way.

    Args:
        ops: ops of the segment's parts, in order. How they are cut does not matter.
    """
    made = {tensor for op in ops for tensor in op.outputs}
    chain: set[PTensor] = set()
    for op in ops:
        wanted = {tensor for tensor in op.inputs if tensor.requires_grad}
        inputs = {t for t in wanted if t in chain or (t.kind != PARAMETER and t not in made)}
        if inputs:
            chain.update(op.outputs)
        yield HalvesOfOp(op, frozenset(inputs), frozenset(wanted - inputs))


def reads_weights_late(segment: Segment) -> bool:
    """Whether W may read the value of a weight.

    If it does not, an FSDP unit may drop the weights after I. An op of an unknown kind is assumed
    to read its weights.
    """
    return any(map(_reads_weights, halves_of(segment.ops)))


def _reads_weights(halves: HalvesOfOp) -> bool:
    op = halves.op
    own = [i for i, t in enumerate(op.inputs) if t in halves.weights and t.kind == PARAMETER]
    if not own:
        return False
    # An operand computed from other weights, in an op without inputs, gets its gradient in W
    # through this op.
    is_passed_on = not halves.inputs and any(t.kind != PARAMETER for t in halves.weights)
    return is_passed_on or min(own) < _FIRST_WEIGHT.get(op.kind, len(op.inputs))
