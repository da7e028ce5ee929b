"""Recycling by plain torch: the reference for programs that recycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def last_pass(
    model: nn.Module, inputs: Sequence[Tensor], recycled: Mapping[str, int], passes: int = 0
) -> Tensor:
    """The loss of the last of several passes; those before it have no gradient.

    Args:
        model: its ``forward`` returns the loss, followed by results if it recycles.
        inputs: arguments of ``forward``; the recycled ones come last, with their first values.
        recycled: the recycled arguments in order, each with the number of the result that replaces
            it in the next pass.
        passes: number of passes before the last.
    """
    given = inputs[: len(inputs) - len(recycled)]
    before: Sequence[Tensor] = inputs[len(given) :]
    for _ in range(passes):
        with torch.no_grad():
            made = model(*given, *before)
        before = [made[number] for number in recycled.values()]
    made = model(*given, *before)
    loss: Tensor = made if isinstance(made, Tensor) else made[0]
    return loss
