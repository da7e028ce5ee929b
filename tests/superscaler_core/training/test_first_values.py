"""First values: all ranks start with those of the first rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from superscaler_core.run import Transport
from superscaler_core.training.first_values import share_buffers
from superscaler_core.training.load import in_threads


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(3),
        torch.arange(3.0)[:, None].expand(3, 4),
        torch.arange(6.0).view(2, 3).T,
        torch.tensor([1 + 2j, 3j]),
    ],
    ids=["plain", "scalar", "expanded", "transposed", "complex"],
)
def test_all_ranks_get_the_buffers_of_the_first(values: Tensor) -> None:
    def work(transport: Transport) -> Tensor:
        own = values
        if transport.rank:
            memory = torch.zeros(values.untyped_storage().nbytes(), dtype=torch.uint8)
            own = memory.view(values.dtype).as_strided(values.shape, values.stride())
        share_buffers({"buffer": own}, 2, transport, torch.device("cpu"))
        return own

    for found in in_threads(work, range(2)).values():
        assert torch.equal(found, values)
