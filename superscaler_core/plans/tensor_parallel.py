"""Tensor parallel: the grid of batch times inner features that several plans are made of."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.graph.graph import Op
from superscaler_core.plan import Axis, Device, Plan
from superscaler_core.plans import cuts


def tensor_parallel(
    plan: Plan,
    ops: Sequence[Op],
    devices: Sequence[Device],
    tp: int,
    *,
    sequence: bool = False,
    vocabulary: bool = False,
    features: str = "",
) -> None:
    """Cut ops along the batch among groups of ``tp`` devices, and in a group by features.

    Args:
        plan: to fill.
        ops: some of its ops.
        devices: to use, those of a group next to each other.
        tp: devices of a group; divides their number.
        sequence: cut ops without features along the sequence, instead of replicating them.
        vocabulary: the words of the embedding and the head are features too. What is behind the
            head needs all words, so it is cut along the sequence.
        features: what is cut, as ``cuts.inner`` takes it.
    """
    outer = Axis(len(devices) // tp, (plan.dims.batch,))
    words = cuts.vocabulary(plan) if vocabulary and tp > 1 else ()
    dims = words + (cuts.inner(plan, features) if tp > 1 else ())
    has_tokens = tp > 1 and (sequence or vocabulary)
    tokens = (*cuts.sequences(plan), plan.dims.batch) if has_tokens else ()
    head = cuts.last_scores(plan, words)
    for is_behind in (False, True):
        chosen = [op for op in ops if (op.index > head) is is_behind]
        inside = Axis(tp, (*dims, *tokens) if sequence or is_behind else dims)
        cuts.spread_all(plan, [outer, inside], chosen, devices)
