from __future__ import annotations

import itertools

import numpy as np
import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.materialize.sharding import HeldBox, Sharding
from superscaler_core.materialize.transfer import Transfer, transfers

SHAPE = (6, 4)


def box(text: str) -> rv.Box:
    return rv.Box.parse(text)


def sharding(num_summands: int, *views: tuple[int, str, int]) -> Sharding:
    return Sharding(num_summands, tuple(sorted(HeldBox(d, box(b), k) for d, b, k in views)))


WHOLE = "[0:6,0:4]"
REPLICAS = sharding(1, *((d, WHOLE, 0) for d in range(4)))
SUMMANDS = sharding(4, *((d, WHOLE, d) for d in range(4)))
ROWS = sharding(1, (0, "[0:3,0:4]", 0), (1, "[3:6,0:4]", 0))
UNEVEN = sharding(1, (0, "[0:1,0:4]", 0), (1, "[1:6,0:4]", 0))
GRID = sharding(
    1,
    *((2 * i + j, f"[{3 * i}:{3 * i + 3},{2 * j}:{2 * j + 2}]", 0) for i in (0, 1) for j in (0, 1)),
)
MIXED = sharding(
    2, (0, "[0:3,0:4]", 0), (1, "[0:3,0:4]", 1), (2, "[3:6,0:4]", 0), (3, "[3:6,0:4]", 1)
)
HALO = sharding(1, (0, "[0:4,0:4]", 0), (1, "[2:6,0:4]", 0))
HALO_GRADS = sharding(2, (0, "[0:4,0:4]", 0), (1, "[2:6,0:4]", 1))
STRIDED = sharding(
    1, (0, "[0:1,0:4]", 0), (1, "[1:2,0:4]", 0), (0, "[2:4,0:4]", 0), (1, "[4:6,0:4]", 0)
)
TWO_SUMS_EACH = sharding(4, *((d // 2, WHOLE, d) for d in range(4)))
LOPSIDED = sharding(2, (0, WHOLE, 0), (1, WHOLE, 1), (2, WHOLE, 1))

ENDS = {
    "replicas": REPLICAS, "summands": SUMMANDS, "rows": ROWS, "uneven": UNEVEN, "grid": GRID,
    "mixed": MIXED, "halo": HALO, "strided": STRIDED, "two sums each": TWO_SUMS_EACH,
    "lopsided": LOPSIDED, "halo grads": HALO_GRADS,
}  # fmt: skip
# Two parts may read the same element, but only one may write it.
WRITTEN = [name for name in ENDS if name != "halo"]


def moved(src: Sharding, dst: Sharding) -> None:
    """Simulate all transfers and compare the result of every device with the whole tensor."""
    generator = np.random.default_rng(0)
    summands = generator.integers(1, 9, (max(k for _, k in src.held) + 1, *SHAPE)).astype(float)
    whole = np.zeros(SHAPE)
    for part, k in src.held:
        index = part.slices_within(box(WHOLE))
        whole[index] += summands[k][index]
    got = {d: np.full(shard.box.shape, np.nan) for d, shard in dst.shards.items()}
    for transfer in transfers(src, dst, SHAPE, "float64"):
        shards = {}
        for rank in transfer.src.ranks:
            held = np.zeros(SHAPE)
            for part, k in src.shards[rank].held:
                index = part.slices_within(box(WHOLE))
                held[index] += summands[k][index]
            shards[rank] = held[_within(transfer, transfer.src.cell(rank).box)]
        result = rv.simulate(transfer.plan(), shards)
        for rank, shard in result.shards.items():
            cell = _shifted(transfer, transfer.dst.cell(rank).box)
            got[rank][cell.slices_within(dst.shards[rank].box)] = shard
    for device, shard in dst.shards.items():
        np.testing.assert_array_equal(got[device], whole[shard.box.slices_within(box(WHOLE))])


def _shifted(transfer: Transfer, cell: rv.Box) -> rv.Box:
    lo = transfer.box.lo
    return rv.Box(
        tuple(a + b for a, b in zip(cell.lo, lo, strict=True)),
        tuple(a + b for a, b in zip(cell.hi, lo, strict=True)),
    )


def _within(transfer: Transfer, cell: rv.Box) -> tuple[slice, ...]:
    return _shifted(transfer, cell).slices_within(box(WHOLE))


@pytest.mark.parametrize("src, dst", [*itertools.product(WRITTEN, ENDS)][::3])
def test_transfers_give_every_device_the_sum_of_all_summands(src: str, dst: str) -> None:
    moved(ENDS[src], ENDS[dst].whole)


@pytest.mark.parametrize(
    "end, text",
    [
        ("replicas", "R(4)V(1)D(1,1) shape(6,4) ranks(0:4)"),
        ("summands", "R(1)V(4)D(1,1) shape(6,4) ranks(0:4)"),
        ("rows", "R(1)V(1)D(2,1) shape(6,4) ranks(0,1)"),
        ("uneven", "R(1)V(1)D(2,1) shape(6,4) ranks(0,1) cuts(0,1,6;0,4)"),
        ("grid", "R(1)V(1)D(2,2) shape(6,4) ranks(0:4)"),
        ("mixed", "R(1)V(2)D(2,1) shape(6,4) ranks(0,2,1,3)"),
        ("two sums each", "R(1)V(2)D(1,1) shape(6,4) ranks(0,1)"),
    ],
)
def test_side_that_forms_a_layout_moves_in_one_transfer(end: str, text: str) -> None:
    (transfer,) = transfers(ENDS[end], REPLICAS, SHAPE, "float64")
    assert str(transfer.src) == text


@pytest.mark.parametrize("end", ["halo grads", "strided", "lopsided"])
def test_side_that_forms_no_layout_moves_in_regions_that_tile_the_tensor(end: str) -> None:
    found = transfers(ENDS[end], ROWS, SHAPE, "float64")
    assert sum(transfer.box.num_elements for transfer in found) == box(WHOLE).num_elements
    assert all(a.box.intersect(b.box) is None for a, b in itertools.combinations(found, 2))


def chain(num: int) -> tuple[Sharding, Sharding]:
    """Rows of a chain of devices, and the same rows with one row of each neighbour."""
    rows = [(2 * d, 2 * d + 2) for d in range(num)]
    halos = [(max(0, lo - 1), min(2 * num, hi + 1)) for lo, hi in rows]
    return (
        sharding(1, *((d, f"[{lo}:{hi},0:4]", 0) for d, (lo, hi) in enumerate(rows))),
        sharding(num, *((d, f"[{lo}:{hi},0:4]", d) for d, (lo, hi) in enumerate(halos))),
    )


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("num", [2, 3, 13])
def test_halo_exchange_sends_only_the_bytes_of_the_halo(num: int, is_back: bool) -> None:
    rows, halos = chain(num)
    ends = (halos, rows) if is_back else (rows, halos.whole)
    found = [t for t in transfers(*ends, (2 * num, 4), "float64") if not t.is_idle]
    # Neighbours send each other a row of four float64, and no other device takes part.
    assert sum(t.plan().cost.wire_bytes for t in found) == 2 * (num - 1) * 4 * 8
    assert all(b - a == 1 for a, b in (t.devices for t in found))


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("num", [3, 8, 13])
def test_halo_exchange_of_a_chain_takes_a_constant_number_of_rounds(
    num: int, is_back: bool
) -> None:
    rows, halos = chain(num)
    ends = (halos, rows) if is_back else (rows, halos.whole)
    done = dict.fromkeys(range(num), 0)
    for transfer in transfers(*ends, (2 * num, 4), "float64"):
        if not transfer.is_idle:
            done |= dict.fromkeys(transfer.devices, 1 + max(done[d] for d in transfer.devices))
    assert max(done.values()) == 4  # the transfers of a device in the middle


def test_overlapping_partial_sums_raise_plan_error() -> None:
    src = sharding(3, (0, WHOLE, 0), (0, WHOLE, 1), (1, WHOLE, 1), (1, WHOLE, 2))
    match = r"is the sum of 3 summands, .*: 0\+1 on \[0\], 1\+2 on \[1\]; put parts of one sum on"
    with pytest.raises(ss.PlanError, match=match):
        transfers(src, REPLICAS, SHAPE, "float64")


@pytest.mark.parametrize("end", sorted(ENDS))
def test_the_order_of_views_does_not_matter(end: str) -> None:
    views = ENDS[end].views
    assert Sharding.joined([Sharding(ENDS[end].num_summands, views)]) == ENDS[end]
