"""Halves: how the backward of a segment falls into I, for its inputs, and W, for its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.program.segments import Segment

_FIRST_WEIGHT = {
    **dict.fromkeys(("linear", "matmul", "conv1d", "conv2d", "conv3d", "mul"), 1),
    **dict.fromkeys(("layer_norm", "group_norm"), 1),
    **dict.fromkeys(("embedding", "add_bias", "add", "to"), 0),
}
"""Kinds of ops whose gradients of weights read no weight, if those before this operand are none."""


@dataclass(frozen=True, slots=True)
class Sides:
    """What a part of an op has gradients of.

    Attributes:
        op: the op.
        inputs: operands that inputs of the segment are behind: I has their gradients.
        weights: operands that are weights, or made of weights alone: W has their gradients.
    """

    op: Op
    inputs: frozenset[PTensor]
    weights: frozenset[PTensor]


def sides_of(ops: Sequence[Op]) -> Iterator[Sides]:
    """The sides of the parts of a segment, as the run time divides them.

    Args:
        ops: of the parts, in order. How they are cut does not matter.
    """
    made = {tensor for op in ops for tensor in op.outputs}
    chain: set[PTensor] = set()
    for op in ops:
        wanted = {tensor for tensor in op.inputs if tensor.requires_grad}
        inputs = {t for t in wanted if t in chain or (t.kind != PARAMETER and t not in made)}
        if inputs:
            chain.update(op.outputs)
        yield Sides(op, frozenset(inputs), frozenset(wanted - inputs))


def reads_weights_late(segment: Segment) -> bool:
    """Whether W may read the value of a weight.

    If not, weights that a window has dropped after I need not be there in W. An op of a kind that
    is not known is taken to read its weights.
    """
    return any(map(_reads_weights, sides_of(segment.ops)))


def _reads_weights(sides: Sides) -> bool:
    op = sides.op
    own = [i for i, t in enumerate(op.inputs) if t in sides.weights and t.kind == PARAMETER]
    if not own:
        return False
    # What is made of other weights gets its gradient in W, if not for inputs, by way of this one.
    is_passed_on = not sides.inputs and any(t.kind != PARAMETER for t in sides.weights)
    return is_passed_on or min(own) < _FIRST_WEIGHT.get(op.kind, len(op.inputs))
