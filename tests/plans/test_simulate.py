"""Laws of the simulator: it defines the result of a program, and counts the bytes that move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.plans.simulate import simulate_program
from rvdcomm.program import Program
from tests.oracle import parts_of, reassembled, shards_of

Shards = dict[int, np.ndarray]
SRC = rv.Layout((6, 10), "R(1)V(2)D(1,3)", ranks=[7, 4, 5, 0, 2, 9])
DST = rv.Layout((6, 10), "R(1)V(1)D(2,2)", ranks=[5, 1, 3, 4])


def inputs(layout: rv.Layout = SRC, dtype: str = "int64") -> Shards:
    return shards_of(layout, parts_of(layout, dtype))


# --- data ---------------------------------------------------------------------------------------


def test_inputs_are_not_modified_even_by_a_program_that_writes_src() -> None:
    program = Program.parse(UNWRITTEN + "add rank 0 src src: [0:4]@0>0\n")
    shard = np.arange(4, dtype=np.int16)
    simulate_program(program, {0: shard})
    assert shard.tolist() == [0, 1, 2, 3]


def test_read_only_inputs_are_accepted() -> None:
    shards = inputs()
    for shard in shards.values():
        shard.flags.writeable = False
    assert set(rv.simulate(rv.plan(SRC, DST, "int64"), shards).shards) == {1, 3, 4, 5}


def test_results_share_no_memory_with_inputs() -> None:
    layout = rv.Layout((6, 10), "R(1)V(1)D(2,1)")
    shards = inputs(layout)
    result = rv.simulate(rv.plan(layout, layout, "int64"), shards)
    assert not any(np.shares_memory(result.shards[rank], shards[rank]) for rank in shards)


def test_inputs_may_be_strided() -> None:
    shards = inputs()
    strided = {rank: np.asfortranarray(shard) for rank, shard in shards.items()}
    plan = rv.plan(SRC, DST, "int64")
    first, second = rv.simulate(plan, shards), rv.simulate(plan, strided)
    assert all(np.array_equal(first.shards[r], second.shards[r]) for r in first.shards)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "complex128"])
def test_shards_keep_the_dtype(dtype: str) -> None:
    result = rv.simulate(rv.plan(SRC, DST, dtype), inputs(dtype=dtype))
    assert {shard.dtype for shard in result.shards.values()} == {np.dtype(dtype)}


def test_bfloat16_is_simulated_as_bits_of_its_size() -> None:
    src, dst = rv.Layout((6, 10), "R(1)V(1)D(3,1)"), rv.Layout((6, 10), "R(1)V(1)D(1,3)")
    bits = np.arange(60, dtype=np.uint16).reshape(6, 10)
    result = rv.simulate(rv.plan(src, dst, "bfloat16"), shards_of(src, [bits]))
    assert np.array_equal(reassembled(dst, result.shards), bits)


@pytest.mark.parametrize("executor", ["dist", "peer"])
@pytest.mark.parametrize("dtype, bits", [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_bits_of_values_that_are_summed_are_rejected(dtype: str, bits: type, executor: str) -> None:
    src, dst = rv.Layout((2,), "R(1)V(2)D(1)"), rv.Layout((2,), "R(2)V(1)D(1)")
    shards = {rank: np.ones(2, bits) for rank in src.ranks}
    with pytest.raises(rv.ShapeMismatchError, match=rf"passed uint\d+, and the plan sums {dtype}"):
        rv.simulate(rv.plan(src, dst, dtype, executor=executor), shards)


def test_bits_of_parts_that_are_not_summed_are_moved() -> None:
    src, dst = rv.Layout((2, 2), "R(1)V(2)D(2,1)"), rv.Layout((2, 2), "R(1)V(2)D(1,2)")
    bits = [np.arange(4, dtype=np.uint16).reshape(2, 2) + 4 * part for part in range(2)]
    result = rv.simulate(rv.plan(src, dst, "bfloat16"), shards_of(src, bits))
    assert {rank: shard.ravel().tolist() for rank, shard in result.shards.items()} == {
        0: [0, 2], 1: [1, 3], 2: [4, 6], 3: [5, 7]
    }  # fmt: skip


def test_sums_run_in_ascending_order_of_parts() -> None:
    # In float32, (1 + 2**24) - 2**24 is 0 and (2**24 - 2**24) + 1 is 1.
    src, dst = rv.Layout((4,), "R(1)V(4)D(1)"), rv.Layout((4,), "R(4)V(1)D(1)")
    values = [1.0, 2.0**24, -(2.0**24), 0.0]
    shards = {rank: np.full(4, values[rank], np.float32) for rank in range(4)}
    result = rv.simulate(rv.plan(src, dst, "float32"), shards)
    want = ((np.float32(1.0) + np.float32(2.0**24)) - np.float32(2.0**24)) + np.float32(0.0)
    assert [shard.tolist() for shard in result.shards.values()] == [[float(want)] * 4] * 4


UNWRITTEN = """\
program int16
src R(1)V(1)D(1) shape(4) ranks(0)
dst R(1)V(1)D(1) shape(4) ranks(0)
buffer src rank 0: [0:4]
buffer dst rank 0: [0:4]
buffer s1 rank 0: [0:4]
"""


@pytest.mark.parametrize(
    "instructions",
    ["", "copy rank 0 s1 dst: [0:4]@0>0\n"],
    ids=["dst not written", "staging not written"],
)
def test_unwritten_memory_holds_the_poison_byte(instructions: str) -> None:
    program = Program.parse(UNWRITTEN + instructions)
    result = simulate_program(program, {0: np.zeros(4, np.int16)})
    assert result.shards[0].tobytes() == b"\xa5" * 8


# --- counts -------------------------------------------------------------------------------------

COUNTED = """\
program int32
src R(1)V(1)D(3) shape(9) ranks(0:3)
dst R(1)V(1)D(1) shape(9) ranks(1)
buffer src rank 0: [0:3]
buffer src rank 1: [3:6]
buffer src rank 2: [6:9]
buffer dst rank 1: [0:9]
collective all_to_all step 0 ranks 0:3 src,src,src -,dst,-
  0->1: [0:3]@0>0
  1->1: [3:6]@0>0
  2->1: [6:9]@0>0
"""


def counted() -> rv.SimulationResult:
    program = Program.parse(COUNTED)
    return simulate_program(program, inputs(program.src, "int32"))


def test_only_bytes_between_different_ranks_are_counted() -> None:
    found = counted()
    assert found.sent_bytes == {0: 12, 1: 0, 2: 12}
    assert found.recv_bytes == {0: 0, 1: 24, 2: 0}
    assert found.wire_bytes == 24
    # The shards, because nothing is staged.
    assert found.peak_bytes == {0: 12, 1: 12 + 36, 2: 12}


# --- bad input ----------------------------------------------------------------------------------

WHAT = r"^simulate R\(1\)V\(2\)D\(1,3\) -> R\(1\)V\(1\)D\(2,2\): "


def without(rank: int) -> Callable[[Shards], None]:
    return lambda shards: shards.pop(rank)


def with_shard(rank: int, shard: np.ndarray) -> Callable[[Shards], None]:
    return lambda shards: shards.update({rank: shard})


@pytest.mark.parametrize(
    "change, message",
    [
        (without(5), r"rank 5 passed no shard, its shard is \[6, 2\]\."),
        (with_shard(1, np.zeros((3, 5), np.int64)), "rank 1 passed a shard but is not in src"),
        (with_shard(4, np.zeros((4, 6), np.int64)), r"rank 4 passed \[4, 6\], its shard is"),
        (with_shard(4, np.zeros(24, np.int64)), r"rank 4 passed \[24\], its shard is \[6, 4\]"),
        (with_shard(4, np.zeros((6, 4), np.int32)), "rank 4 passed int32, the plan is for int64"),
        (with_shard(4, np.zeros((6, 4), np.float64)), "rank 4 passed float64"),
    ],
    ids=["missing", "extra", "transposed", "flat", "smaller dtype", "mixed dtypes"],
)
def test_wrong_shard_raises_error_that_names_its_rank(
    change: Callable[[Shards], None], message: str
) -> None:
    shards = inputs()
    change(shards)
    with pytest.raises(rv.ShapeMismatchError, match=WHAT + message):
        rv.simulate(rv.plan(SRC, DST, "int64"), shards)
