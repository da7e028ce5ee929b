"""Laws of overlap: equal to the comparison of bytes, and no comparison of all pairs."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from rvdcomm.api.overlap import Region, RegionIndex, first_overlap, strided

BLOCK = torch.empty(600, dtype=torch.uint8)


def random_view(rng: random.Random) -> Tensor:
    """A view of the block: sliced with steps, transposed, of items of several bytes, or by hand."""
    item = rng.choice([torch.uint8, torch.int16, torch.int32])
    shape = [rng.choice([1, 2, 3, 5]) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.3:
        strides = [rng.choice([1, 2, 3, 5, 7, 12]) for _ in shape]
        return BLOCK.view(item)[rng.randrange(20) :].as_strided(shape, strides)
    whole = BLOCK.view(item)[: 5 * 5 * 5].view(5, 5, 5).permute(rng.sample(range(3), 3))
    index = []
    for size in whole.shape:
        start, step = rng.randrange(size), rng.choice([1, 1, 2, 3])
        index.append(slice(start, rng.randint(start, size), step))
    return whole[tuple(index)]


def bytes_of(view: Tensor) -> set[int]:
    steps = [
        np.arange(n) * s * view.itemsize for n, s in zip(view.shape, view.stride(), strict=True)
    ]
    places = np.array([view.storage_offset() * view.itemsize])
    for step in [*steps, np.arange(view.itemsize)]:
        places = np.add.outer(places, step).reshape(-1)
    return set(places.tolist())


def named(views: list[Tensor]) -> list[Region]:
    return [Region.of(view, str(i)) for i, view in enumerate(views)]


@pytest.mark.parametrize("seed", range(5))
def test_two_regions_meet_if_and_only_if_their_tensors_share_a_byte(seed: int) -> None:
    rng = random.Random(seed)
    wrong = []
    for _ in range(300):
        a, b = random_view(rng), random_view(rng)
        if Region.of(a).meets(Region.of(b)) != bool(bytes_of(a) & bytes_of(b)):
            wrong.append((a.shape, a.stride(), b.shape, b.stride()))
    assert wrong == []


def apart(views: list[Tensor]) -> list[Tensor]:
    """Those whose own elements have places of their own, which an out must have."""
    return [v for v in views if len(bytes_of(v)) == v.numel() * v.itemsize]


@pytest.mark.parametrize("seed", range(5))
def test_first_overlap_is_one_of_the_pairs_that_share_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        views = apart([random_view(rng) for _ in range(rng.choice([2, 3, 30]))])
        held = [bytes_of(view) for view in views]
        pairs = {(i, j) for i, j in combinations(range(len(views)), 2) if held[i] & held[j]}
        found = first_overlap(named(views))
        assert (found is None) == (not pairs)
        assert found is None or tuple(sorted(map(int, found))) in pairs


@pytest.mark.parametrize("seed", range(5))
def test_an_index_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    known = named([random_view(rng) for _ in range(8)])
    others = named([random_view(rng) for _ in range(40)])
    found = {region.name: sorted(names) for region, names in RegionIndex(known).meeting(others)}
    scanned = {b.name: sorted(a.name for a in known if a.meets(b)) for b in others}
    assert found == {name: names for name, names in scanned.items() if names}


WHOLE = torch.empty(8, 3000)
APART = {
    "rows": [WHOLE.view(-1)[24 * i : 24 * i + 24] for i in range(1000)],
    "columns": [WHOLE[:, 3 * i : 3 * i + 3] for i in range(1000)],
    "columns that alternate": [WHOLE[:, i::1000] for i in range(1000)],
    "columns of unequal length": [WHOLE[: 2 + i % 7, 3 * i : 3 * i + 3] for i in range(1000)],
    "heads of a fused weight": [WHOLE.view(10, 100, 24)[:, i] for i in range(100)],
}


@pytest.mark.parametrize("what", APART)
def test_views_that_lie_apart_are_found_apart_without_comparing_pairs(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(Region, "meets", lambda a, b: compared.append((a, b)))
    regions = named(APART[what])
    assert first_overlap(regions) is None
    more = regions[-1]._replace(start=regions[-1].start - 1, name="more")
    assert first_overlap([*regions, more]) is not None
    assert compared == []


def test_two_views_of_many_rows_are_compared_without_listing_them() -> None:
    one, other = (strided(i, 1, [(1 << 20, 1 << 20), (2, 1 << 10)], str(i)) for i in (0, 1))
    assert first_overlap([one, other]) is None
    assert first_overlap([one, one]) == ("0", "0")


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_an_empty_tensor_overlaps_nothing(shape: tuple[int, ...]) -> None:
    whole = torch.empty(12)
    empty = whole.as_strided(shape, [1] * len(shape))
    assert first_overlap(named([whole, empty, empty])) is None
