"""Limits of scale: costs on 100,000 ranks, and data of 512 ranks in one process.

Time limits are of processor time, several times that of an idle core, which may be shared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import rvdcomm as rv
from bench.rvd.cases import definitions
from tests.covering import each_value

NUM_RANKS = 100_000
WORLDS = {"12,500 hosts of 8": (12_500, 8), "20 pods of 625 hosts of 8": (20, 625, 8)}
CATEGORIES = definitions()["categories"]


@contextmanager
def within(secs: float) -> Iterator[None]:
    """Fails if the block takes more processor time."""
    start = time.process_time()
    yield
    assert time.process_time() - start < secs


def layouts_of(category: str, src: range, dst: range, rows: int) -> tuple[rv.Layout, rv.Layout]:
    counts = {"n": len(src), "m": len(dst)}
    texts = (text.format(**counts) for text in CATEGORIES[category])
    a, b = (rv.Layout((rows, rows), *x) for x in zip(texts, (src, dst), strict=True))
    return a, b


@pytest.fixture(scope="module", params=WORLDS.values(), ids=WORLDS)
def world(request: pytest.FixtureRequest) -> rv.Topology:
    with within(8):
        return rv.Topology.preset("dgx-h100", *request.param)


@pytest.mark.parametrize(
    "world, category",
    [([*WORLDS.values()][i // 3], category) for i, category in enumerate(CATEGORIES)],
    indirect=["world"],
)
def test_a_plan_of_100_000_ranks_is_priced_bounded_and_printed_in_seconds(
    world: rv.Topology, category: str
) -> None:
    ranks = range(NUM_RANKS)
    with within(8):
        plan = rv.plan(*layouts_of(category, ranks, ranks, NUM_RANKS), "bfloat16", world)
        text = str(plan)
    assert plan.bound.wire_bytes <= plan.cost.wire_bytes
    assert plan.bound.secs <= plan.cost.secs
    assert max(map(len, text.splitlines())) < 200
    assert "program" not in vars(plan), "nothing is lowered"


@each_value(category=CATEGORIES, nums=[(32_000, 32_000), (32_000, 64_000), (64_000, 32_000)])
def test_a_plan_between_groups_of_thousands_is_priced_bounded_and_printed_in_seconds(
    category: str, nums: tuple[int, int]
) -> None:
    num_src, num_dst = nums
    world = rv.Topology.preset("dgx-h100", NUM_RANKS // 8, 8)
    src, dst = range(num_src), range(num_src, num_src + num_dst)
    with within(8):
        plan = rv.plan(*layouts_of(category, src, dst, 64_000), "bfloat16", world)
        str(plan)
    assert plan.bound.secs <= plan.cost.secs


def test_uneven_cuts_cost_at_most_even_cuts_of_the_next_larger_size(world: rv.Topology) -> None:
    ranks = range(NUM_RANKS)
    with within(10):
        plan = rv.plan(*layouts_of("D->R", ranks, ranks, NUM_RANKS + 10), "bfloat16", world)
        str(plan)
    even = rv.plan(*layouts_of("D->R", ranks, ranks, 2 * NUM_RANKS), "bfloat16", world)
    assert plan.cost.secs <= even.cost.secs


# --- data ---------------------------------------------------------------------------------------

NUM_SIMULATED = {"R->R": 512, "R->D": 512, "V->R": 512, "V->D": 128, "D->R": 128, "D->D'": 128}
"""Lowering takes most of the time: 512 ranks of the last three are a minute of processor time."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("category", CATEGORIES)
def test_data_of_hundreds_of_ranks_is_simulated(category: str) -> None:
    n = NUM_SIMULATED[category]
    ranks, topology = range(n), rv.Topology.preset("dgx-h100", n // 8, 8)
    plan = rv.plan(*layouts_of(category, ranks, ranks, n), "uint8", topology)
    whole = np.arange(n * n, dtype=np.uint8).reshape(n, n)

    def part(layout: rv.Layout, rank: int, tensor: np.ndarray) -> np.ndarray:
        cell = layout.cell(rank)
        index = tuple(map(slice, cell.box.lo, cell.box.hi))
        return tensor[index] if cell.part == 0 else np.ones_like(tensor[index])

    result = rv.simulate(plan, {rank: part(plan.src, rank, whole) for rank in ranks})
    total = whole + np.uint8((plan.src.rvd.v - 1) % 256)
    wrong = [r for r in ranks if not np.array_equal(result.shards[r], part(plan.dst, r, total))]
    assert wrong == []
    assert result.wire_bytes == plan.cost.wire_bytes, "modelled bytes are moved bytes"
    assert max(result.recv_bytes.values()) == plan.cost.recv_bytes
