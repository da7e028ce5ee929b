"""Memory cost: what a choice takes of a device, and what choices take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """Bytes of an op on the device on which it takes most.

    Attributes:
        weights_bytes: of its parameters as they are stored, and of copies of another dtype.
        grads_bytes: of their gradients.
        states_bytes: of the optimizer's numbers.
        kept_bytes: from its forward to its backward, in every microbatch that is between the two.
        input_bytes: of the activations that it reads.
        forward_bytes: the most in its forward, what it keeps included.
        backward_bytes: the most in its backward, with what it kept.
        first_backward_bytes: the same where gradients of its weights come to be.
        saved: the operands that are in ``kept_bytes``: inputs, then outputs, by number, and bytes.
        views: for every output the input whose memory it shares, by number, or None.
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
        """What is there all the time: weights and states."""
        return self.weights_bytes + self.states_bytes


def counted_once(ops: Sequence[Op], costs: Sequence[MemoryCost]) -> tuple[MemoryCost, ...]:
    """The same costs, where a tensor that several ops save is kept by the first of them.

    Args:
        ops: in the order of the forward.
        costs: of each.
    """
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
"""Attributes of a cost that count what is saved."""


def recomputed(group: Sequence[MemoryCost]) -> MemoryCost:
    """What a group of ops takes of which only what enters it is kept.

    Its backward computes all of it again, and holds what its ops save then.

    Args:
        group: costs of ops that follow each other, each with ``Kept.SAVED``.
    """
    kept = group[0].input_bytes
    later = peak_bytes(group, microbatches=2) - sum(each.grads_bytes for each in group)
    return MemoryCost(
        sum(each.weights_bytes for each in group),
        sum(each.grads_bytes for each in group),
        sum(each.states_bytes for each in group),
        kept,
        kept,
        # What enters stays until the group has run; nothing else does.
        max([group[0].forward_bytes, *(kept + each.forward_bytes for each in group[1:])]),
        later,
        peak_bytes(group),
    )


def peak_bytes(chain: Sequence[MemoryCost], *, microbatches: int = 1, in_flight: int = 1) -> int:
    """The most that activations and gradients of a chain of ops take at one time of a step.

    Of the ops before the one that runs there is what they keep; of those behind it, in the first
    backward, the gradients of their weights; in later ones all gradients are there.

    Law (tests/superscaler_core/cost/test_memory_cost.py): for a chain that no communication cuts,
    this is what ``compile(...).memory`` finds, to the byte. It is not where

    - an op saves a tensor that another saves too: it counts twice, unless ``counted_once`` was
      told who reads what;
    - tensors skip ops, as around a residual: they stay longer than the ops that read them run;
    - a bias is added in the call of its product: its gradient waits with that of the weight, and
      the product's result is no tensor of its own;
    - communication cuts the chain in segments: the gradient that enters one stays until its end,
      and what moves takes memory of its own.

    Args:
        chain: costs in the order of the forward.
        microbatches: of a step.
        in_flight: of them, those between forward and backward at one time.
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
    # Behind the first backward there is a microbatch less, if no other was begun since.
    return max(first, later + (min(in_flight, microbatches - 1) - 1) * before[-1])
