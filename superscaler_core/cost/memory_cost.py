"""Memory cost: the memory of one choice on a device, and of several choices together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """Bytes of an op, on the device where it takes the most.

    Attributes:
        weights_bytes: its stored parameters, and copies of another dtype.
        grads_bytes: gradients of its parameters.
        states_bytes: optimizer states of its parameters.
        kept_bytes: bytes kept from forward to backward, for each microbatch between the two.
        input_bytes: the activations that it reads.
        forward_bytes: the peak in its forward, including what it keeps.
        backward_bytes: the peak in its backward, including what it kept.
        first_backward_bytes: the same if the backward allocates the gradients of its weights.
        saved: the operands in ``kept_bytes``, with their bytes: inputs, then outputs, by number.
        views: for every output the number of the input whose memory it shares, or None.
    """

    weights_bytes: int
    grads_bytes: int
    states_bytes: int
    kept_bytes: int
    input_bytes: int
    forward_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    saved: tuple[tuple[int, int], ...] = ()
    views: tuple[int | None, ...] = ()

    @property
    def resting_bytes(self) -> int:
        """Memory that exists all the time: weights and optimizer states."""
        return self.weights_bytes + self.states_bytes


def counted_once(ops: Sequence[Op], costs: Sequence[MemoryCost]) -> tuple[MemoryCost, ...]:
    """The costs of ops in order, where a tensor that several save counts only for the first."""
    made: dict[PTensor, PTensor] = {}
    kept: set[PTensor] = set()
    found = []
    for op, cost in zip(ops, costs, strict=True):
        for output, viewed in zip(op.outputs, cost.views, strict=True):
            if viewed is not None:
                made[output] = made.get(op.inputs[viewed], op.inputs[viewed])
        operands = (*op.inputs, *op.outputs)
        again = 0
        for number, size in cost.saved:
            memory = made.get(operands[number], operands[number])
            again += size if memory in kept else 0
            kept.add(memory)
        less = {name: max(0, getattr(cost, name) - again) for name in _WITH_SAVED}
        found.append(replace(cost, **less) if again else cost)
    return tuple(found)


_WITH_SAVED = ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes")
"""Attributes of a cost that include saved tensors."""


def recomputed(group: Sequence[MemoryCost]) -> MemoryCost:
    """The cost of consecutive ops, each with ``Kept.SAVED``, that keep only the group's inputs.

    The backward recomputes the group, and then holds what the ops save.
    """
    kept = group[0].input_bytes
    later = peak_bytes(group, microbatches=2) - sum(each.grads_bytes for each in group)
    return MemoryCost(
        sum(each.weights_bytes for each in group),
        sum(each.grads_bytes for each in group),
        sum(each.states_bytes for each in group),
        kept,
        kept,
        # The group's inputs stay until it has run; nothing else does.
        max([group[0].forward_bytes, *(kept + each.forward_bytes for each in group[1:])]),
        later,
        peak_bytes(group),
    )


def peak_bytes(chain: Sequence[MemoryCost], *, microbatches: int = 1, in_flight: int = 1) -> int:
    """The peak of activations and gradients of a chain of ops in a step.

    When an op runs, the ops before it hold what they keep. In the first backward, the ops after it
    hold the gradients of their weights; in later backwards all gradients exist.

    Law (tests/superscaler_core/cost/test_memory_cost.py): for a chain without communication, this
    equals the result of ``compile(...).memory``, to the byte. It differs where

    - two ops save the same tensor: it counts twice, unless ``counted_once`` was applied;
    - a tensor skips ops, as around a residual: it lives longer than the ops that read it run;
    - a product adds a bias in its call: the bias gradient waits with that of the weight, and the
      product's result is not a tensor of its own;
    - communication cuts the chain into segments: the gradient that enters a segment lives until
      its end, and communication takes memory of its own.

    Args:
        chain: costs in the order of the forward.
        microbatches: microbatches in a step.
        in_flight: microbatches between forward and backward at a time.
    """
    before = [0, *accumulate(each.kept_bytes for each in chain)]
    behind = [0, *accumulate(each.grads_bytes for each in reversed(chain))][::-1]
    first = max(
        before[i] + max(each.forward_bytes, each.first_backward_bytes + behind[i + 1])
        for i, each in enumerate(chain)
    )
    first += (in_flight - 1) * before[-1]
    if microbatches == 1:
        return first
    later = max(
        before[i] + behind[0] + max(each.forward_bytes, each.backward_bytes)
        for i, each in enumerate(chain)
    )
    # After the first backward one microbatch fewer is in flight, unless another one has started.
    return max(first, later + (min(in_flight, microbatches - 1) - 1) * before[-1])
