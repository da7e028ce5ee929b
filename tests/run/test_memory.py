"""Laws of recycled results: nobody's memory is given away while it is used."""

from __future__ import annotations

import gc

import pytest
import torch

from rvdcomm.run import memory
from rvdcomm.run.memory import MAX_KEPT_BYTES, MIN_BYTES, Blocks, empty

CPU = torch.device("cpu")


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    fresh = Blocks()
    monkeypatch.setattr(memory, "BLOCKS", fresh)
    return fresh


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bool, torch.complex32, torch.float8_e4m3fn, torch.uint16],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3, 5), (1 << 20, 3)], ids=["small", "large"])
def test_a_result_is_as_torch_makes_it(
    blocks: Blocks, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    made = empty(shape, dtype, CPU)
    assert (made.shape, made.dtype, made.is_contiguous()) == (shape, dtype, True)
    made.view(torch.uint8).fill_(1)
    assert int(made.view(torch.uint8).count_nonzero()) == made.numel() * dtype.itemsize


def test_memory_comes_back_when_the_last_view_is_dropped(blocks: Blocks) -> None:
    made = empty((MIN_BYTES,), torch.float32, CPU)
    address, view = made.data_ptr(), made[7:].numpy()
    del made
    gc.collect()
    assert blocks.kept_bytes == 0
    del view
    gc.collect()
    assert blocks.kept_bytes == 4 * MIN_BYTES
    assert empty((MIN_BYTES,), torch.int32, CPU).data_ptr() == address


def test_results_that_live_at_once_share_nothing(blocks: Blocks) -> None:
    made = [empty((MIN_BYTES,), torch.uint8, CPU).fill_(i) for i in range(5)]
    assert [t.unique().tolist() for t in made] == [[i] for i in range(5)]


def test_small_results_are_torch_s(blocks: Blocks) -> None:
    empty((MIN_BYTES - 1,), torch.uint8, CPU)
    assert blocks.kept_bytes == 0


def test_no_more_is_kept_than_the_limit(blocks: Blocks) -> None:
    size = MAX_KEPT_BYTES // 4
    made = [blocks.take(size) for _ in range(6)]
    for block in made:
        blocks.give_back(block)
    assert blocks.kept_bytes == 4 * size
    # The last to come back is the first to go out: its pages are in the caches.
    assert blocks.take(size) is made[-1]
