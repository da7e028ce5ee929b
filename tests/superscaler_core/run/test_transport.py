"""Laws of the rows of numbers by which ranks agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from superscaler_core.run.together import rows_of
from superscaler_core.run.transport import CPU, DistTransport, Transport
from superscaler_core.training import in_threads


@pytest.mark.parametrize(
    "backend, place", [("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("nccl", "cuda:3")]
)
def test_rows_move_where_the_group_moves_tensors(
    backend: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert DistTransport(0)._place == torch.device(place)


def test_every_rank_gets_the_rows_of_all_on_the_cpu() -> None:
    def rows(transport: Transport) -> Tensor:
        return rows_of(torch.tensor([transport.rank, 7]), (0, 1, 2), transport)

    for found in in_threads(rows, range(3)).values():
        assert found.device == CPU
        assert found.tolist() == [[0, 7], [1, 7], [2, 7]]
