"""Recycling by plain torch: what programs that recycle are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def last_turn(
    model: nn.Module, inputs: Sequence[Tensor], recycled: Mapping[str, int], turns: int = 0
) -> Tensor:
    """The loss of the last of several turns; those before it have no gradient.

    Args:
        model: its ``forward`` returns the loss, and if it recycles, results behind it.
        inputs: arguments of ``forward``; last, and as they are in the first turn, the recycled.
        recycled: those, in order, each with the number of the result that it is in the next turn.
        turns: before the last.
    """
    given = inputs[: len(inputs) - len(recycled)]
    before: Sequence[Tensor] = inputs[len(given) :]
    for _ in range(turns):
        with torch.no_grad():
            made = model(*given, *before)
        before = [made[number] for number in recycled.values()]
    made = model(*given, *before)
    loss: Tensor = made if isinstance(made, Tensor) else made[0]
    return loss
