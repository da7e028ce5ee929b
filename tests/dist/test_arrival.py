"""prove on processes: results of redistribute_many, and a fault that every rank reports."""

from __future__ import annotations

import pytest
import torch

import rvdcomm as rv
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of, shard_of

pytestmark = pytest.mark.dist

SRC = {
    "kept": rv.Layout((6, 10), "R(2)V(1)D(2,1)"),
    "rounded": rv.Layout((9, 4), "R(1)V(1)D(1,3)", [3, 0, 1]),
    "summed": rv.Layout((6,), "R(1)V(2)D(2)"),
    "counts": rv.Layout((5,), "R(1)V(1)D(1)", [2]),
}
DST = {
    "kept": rv.Layout((6, 10), "R(1)V(1)D(2,2)", [1, 0, 3, 2]),
    "rounded": rv.Layout((9, 4), "R(2)V(1)D(2,1)"),
    "summed": rv.Layout((6,), "R(1)V(1)D(4)"),
    "counts": rv.Layout((5,), "R(4)V(1)D(1)"),
}
DTYPES = {"rounded": torch.bfloat16}


@on_ranks(4)
def test_results_are_proved_and_a_wrong_bit_is_named_on_all_ranks(rank: int) -> None:
    tensors = {name: shard_of(rank, layout) for name, layout in SRC.items()}
    tensors["counts"] = shard_of(rank, SRC["counts"], dtype="int64")
    results = rv.redistribute_many(tensors, SRC, DST, dst_dtype=DTYPES)
    found = rv.prove(tensors, SRC, results, DST, dst_dtype=DTYPES)
    assert found == rv.Arrival(
        3, 6 * 10 * 4 + 2 * 36 * 2 + 4 * 5 * 8, {"summed": "its source is partial sums"}
    )
    if rank == 3:
        results["rounded"].view(torch.int16)[2, 1] ^= 1
    said = error_of(lambda: rv.prove(tensors, SRC, results, DST, dst_dtype=DTYPES))
    assert said.startswith(
        "CommError: prove: not all values arrived: tensor 'rounded': the result of rank 3, box "
        "[5:9,0:4], has digest 0x"
    )
    assert "; " not in said
    (difference,) = rv.prove(tensors, SRC, results, DST, dst_dtype=DTYPES, check=False).differences
    assert (difference.name, difference.rank) == ("rounded", 3)


@on_ranks(4)
def test_values_that_are_no_numbers_arrive_too(rank: int) -> None:
    """Conversions make other NaNs of them; integers stay as they are under one dtype for all."""
    src, dst = {n: SRC[n] for n in ("kept", "counts")}, {n: DST[n] for n in ("kept", "counts")}
    tensors = {"kept": shard_of(rank, src["kept"]), "counts": shard_of(rank, src["counts"])}
    tensors["kept"][1, 2] = torch.nan
    if tensors["counts"] is not None:
        tensors["counts"] = tensors["counts"].to(torch.int64)
    results = rv.redistribute_many(tensors, src, dst, dst_dtype=torch.bfloat16)
    found = rv.prove(tensors, src, results, dst, dst_dtype=torch.bfloat16)
    assert (found.num_tensors, found.unproved) == (2, {})


@on_ranks(4)
def test_replicas_of_a_source_that_differ_are_named(rank: int) -> None:
    tensors = {"kept": shard_of(rank, SRC["kept"])}
    if rank == 3:
        tensors["kept"][0, 0] += 1
    src, dst = {"kept": SRC["kept"]}, {"kept": rv.Layout((6, 10), "R(1)V(1)D(1,1)", [1])}
    results = rv.redistribute_many(tensors, src, dst)
    found = rv.prove(tensors, src, results, dst, check=False)
    assert ("kept", 3, True) in [(x.name, x.rank, x.is_src) for x in found.differences]


@on_ranks(4)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(rank: int) -> None:
    src, dst = {"kept": SRC["kept"]}, {"kept": DST["kept"]}
    tensors = {"kept": shard_of(rank, SRC["kept"])}
    results = {"kept": torch.zeros(3, 5) if rank != 2 else torch.zeros(3)}
    said = error_of(lambda: rv.prove(tensors, src, results, dst))
    assert said == (
        "ShapeMismatchError: prove: tensor 'kept': rank 2 passed [3] in results, its shard is "
        "[3, 5]."
    )
