"""Ways to call ``redistribute``: any strides, out=, async_op, texts, groups, many calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm.run.world import World
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import Worlds
from tests.oracle import all_rvds

pytestmark = pytest.mark.dist

SHAPE = (6, 10)
TRANSITIONS = [
    ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
    ("R(1)V(1)D(1,4)", "R(4)V(1)D(1,1)"),
    ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    ("R(2)V(2)D(1,1)", "R(1)V(1)D(2,2)"),
    ("R(4)V(1)D(1,1)", "R(1)V(1)D(2,2)"),
    ("R(1)V(1)D(2,2)", "R(1)V(1)D(2,2)"),
]
"""Exchange, gather, sum, sum and split, slice, and nothing to do; ragged."""

FREE_ROUNDS = rv.Topology.single_host(4, alpha_secs=0.0, bytes_per_sec=1e9)


def pair_of(src_rvd: str, dst_rvd: str) -> tuple[rv.Layout, rv.Layout]:
    return rv.Layout(SHAPE, src_rvd), rv.Layout(SHAPE, dst_rvd)


# --- strides ------------------------------------------------------------------------------------


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def strided(tensor: Tensor) -> Tensor:
    """Every second column and third row of a larger tensor, at an offset."""
    rows, columns = tensor.shape
    room = tensor.new_full((3 * rows + 2, 2 * columns + 1), 99)
    view = room[2 : 2 + 3 * rows : 3, 1 : 1 + 2 * columns : 2]
    return view.copy_(tensor)


def narrowed(tensor: Tensor) -> Tensor:
    """Contiguous, but not at the start of its storage."""
    rows, columns = tensor.shape
    room = tensor.new_full((rows + 3, columns), 99)
    return room[3:].copy_(tensor)


STRIDES = (transposed, strided, narrowed)


def move_strided(
    rank: int, src: rv.Layout, dst: rv.Layout, stride: Callable[[Tensor], Tensor]
) -> tuple[Tensor, bool]:
    tensor = stride(shard_of(rank, src))
    storage = tensor.untyped_storage().tolist()
    result = rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS)
    return result.numpy(), storage == tensor.untyped_storage().tolist()


@pytest.mark.parametrize(
    "src_rvd, dst_rvd, stride",
    [(*pair, STRIDES[i % 3]) for i, pair in enumerate(TRANSITIONS)],
)
def test_input_may_have_any_strides_and_is_not_modified(
    worlds: Worlds, src_rvd: str, dst_rvd: str, stride: Callable[[Tensor], Tensor]
) -> None:
    src, dst = pair_of(src_rvd, dst_rvd)
    results, unchanged = zip(*worlds(4).run(move_strided, src, dst, stride), strict=True)
    assert faults_of(results, src, dst) == []
    assert unchanged == (True,) * 4


def move_expanded(rank: int, src: str, dst: str) -> list[float]:
    tensor = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 5)
    return rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS).tolist()


def test_input_may_be_expanded(worlds: Worlds) -> None:
    results = worlds(4).run(move_expanded, "R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)")
    assert results == [[[4.0] * 5, [8.0] * 5, [16.0] * 5]] * 4


def sum_of_lazy_view(rank: int, kind: str, src: str, dst: str) -> complex:
    """Move a tensor whose memory holds the conjugate, or the negative, of its values."""
    value = torch.full((4, 4), complex(rank + 1, 10 * rank + 1), dtype=torch.complex64)
    tensor = value.conj() if kind == "conj" else value.conj().imag
    assert tensor.is_conj() or tensor.is_neg()
    return rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS).sum().item()


@pytest.mark.parametrize(
    "src_rvd, dst_rvd, num_copies, kind",
    [
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", 16, "conj"),
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", 4, "neg"),
        ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", 16, "neg"),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", 4, "conj"),
    ],
)
def test_input_may_be_a_lazy_conjugate_or_negative(
    worlds: Worlds, kind: str, src_rvd: str, dst_rvd: str, num_copies: int
) -> None:
    # A result has num_copies elements of every rank's value, or of the sum of all values.
    total = num_copies * complex(1 + 2 + 3 + 4, -(1 + 11 + 21 + 31))
    sums = worlds(4).run(sum_of_lazy_view, kind, src_rvd, dst_rvd)
    assert sums == [total if kind == "conj" else total.imag] * 4


# --- shapes -------------------------------------------------------------------------------------


def move(rank: int, src: rv.Layout, dst: rv.Layout) -> Any:
    if rank not in src and rank not in dst:
        return None
    result = rv.redistribute(shard_of(rank, src), src, dst, topology=FREE_ROUNDS)
    return None if result is None else result.numpy()


@pytest.mark.parametrize(
    "src, dst",
    [
        (rv.Layout((), "R(1)V(4)D()"), rv.Layout((), "R(4)V(1)D()")),
        (rv.Layout((), "R(1)V(1)D()", [2]), rv.Layout((), "R(4)V(1)D()")),
        (rv.Layout((), "R(4)V(1)D()"), rv.Layout((), "R(1)V(4)D()")),
        (rv.Layout((), "R(1)V(3)D()", [3, 1, 0]), rv.Layout((), "R(1)V(1)D()", [2])),
    ],
    ids=str,
)
def test_tensors_of_0_dims_are_moved(worlds: Worlds, src: rv.Layout, dst: rv.Layout) -> None:
    assert faults_of(worlds(4).run(move, src, dst), src, dst) == []


@pytest.mark.parametrize(
    "src, dst",
    [
        (rv.Layout((2,), "R(1)V(1)D(4)"), rv.Layout((2,), "R(4)V(1)D(1)")),
        (rv.Layout((2,), "R(1)V(4)D(1)"), rv.Layout((2,), "R(1)V(1)D(4)")),
        (rv.Layout((5,), "R(1)V(1)D(4)"), rv.Layout((5,), "R(1)V(1)D(4)", cuts="balanced")),
        (
            rv.Layout((9,), "R(1)V(1)D(4)", cuts=[[0, 0, 9, 9, 9]]),
            rv.Layout((9,), "R(1)V(1)D(4)", cuts=[[0, 9, 9, 9, 9]]),
        ),
        (rv.Layout((1, 3), "R(1)V(1)D(2,2)"), rv.Layout((1, 3), "R(2)V(1)D(2,1)")),
        (rv.Layout((0,), "R(1)V(1)D(4)"), rv.Layout((0,), "R(2)V(2)D(1)")),
        (rv.Layout((3, 0), "R(1)V(4)D(1,1)"), rv.Layout((3, 0), "R(4)V(1)D(1,1)")),
    ],
    ids=str,
)
def test_shards_may_be_empty(worlds: Worlds, src: rv.Layout, dst: rv.Layout) -> None:
    assert faults_of(worlds(4).run(move, src, dst), src, dst) == []


def move_nothing(rank: int) -> tuple[list[float], bool]:
    layout = rv.Layout((4, 3), "R(1)V(1)D(4,1)")
    tensor = torch.arange(3.0).view(1, 3)
    result = rv.redistribute(tensor, layout, layout)
    result += 1
    return tensor.tolist(), result.data_ptr() == tensor.data_ptr()


def test_result_is_new_memory_even_if_nothing_moves(worlds: Worlds) -> None:
    assert worlds(4).run(move_nothing) == [([[0.0, 1.0, 2.0]], False)] * 4


# --- out= ---------------------------------------------------------------------------------------


def contiguous(tensor: Tensor) -> Tensor:
    return tensor


def rest_of_storage(tensor: Tensor) -> float:
    """The sum of the elements of a storage that are not in the tensor."""
    room = torch.tensor(tensor.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32)
    return (room.double().sum() - tensor.double().sum()).item()


def move_to_out(
    rank: int, src: rv.Layout, dst: rv.Layout, stride: Callable[[Tensor], Tensor]
) -> tuple[Any, bool, float]:
    out = stride(torch.full(dst.cell(rank).box.shape, -7.0))
    rest = rest_of_storage(out)
    result = rv.redistribute(shard_of(rank, src), src, dst, topology=FREE_ROUNDS, out=out)
    return out.numpy().copy(), result is out, rest_of_storage(out) - rest


@pytest.mark.parametrize(
    "src_rvd, dst_rvd, stride",
    [(*pair, (contiguous, *STRIDES)[i % 4]) for i, pair in enumerate(TRANSITIONS)],
)
def test_result_is_written_to_out_and_no_other_memory(
    worlds: Worlds, src_rvd: str, dst_rvd: str, stride: Callable[[Tensor], Tensor]
) -> None:
    src, dst = pair_of(src_rvd, dst_rvd)
    results, are_out, changes = zip(*worlds(4).run(move_to_out, src, dst, stride), strict=True)
    assert faults_of(results, src, dst) == []
    assert are_out == (True,) * 4
    assert changes == (0.0,) * 4


OUTS = {"first call": [[2, 3]], "later call": [[], [2, 3]], "by turns": [[2], [3], [2, 3], []]}
"""Ranks that give ``out`` in each of some calls of one transition."""


def move_to_some_outs(
    rank: int, src: rv.Layout, dst: rv.Layout, with_out: list[list[int]]
) -> list[Any]:
    results = []
    for seed, ranks in enumerate(with_out):
        out = torch.empty(dst.cell(rank).box.shape) if rank in ranks else None
        results.append(rv.redistribute(shard_of(rank, src, seed), src, dst, out=out))
    return [None if result is None else result.numpy() for result in results]


@pytest.mark.parametrize("when", OUTS)
def test_some_ranks_may_give_out(worlds: Worlds, when: str) -> None:
    # Every case has its own shape, so that it starts with a new transition.
    shape = (8 + len(when),)
    src, dst = rv.Layout(shape, "R(1)V(1)D(2)", [0, 1]), rv.Layout(shape, "R(1)V(1)D(2)", [2, 3])
    seen = worlds(4, timeout_secs=3.0).run(move_to_some_outs, src, dst, OUTS[when])
    calls = enumerate(zip(*seen, strict=True))
    assert [faults_of(results, src, dst, seed) for seed, results in calls] == [[]] * len(OUTS[when])


# --- async_op -----------------------------------------------------------------------------------


def call_async(rank: int, num_calls: int) -> tuple[list[Any], list[bool]]:
    """Start many calls, with one that is not asynchronous between them, then wait for all."""
    src, dst = rv.Layout(SHAPE, "R(1)V(2)D(2,1)"), rv.Layout(SHAPE, "R(2)V(1)D(1,2)")
    started: list[Any] = []
    for seed in range(num_calls):
        pair = (src, dst) if seed % 2 else (dst, src)
        if seed == num_calls // 2:
            started.append(rv.redistribute(shard_of(rank, pair[0], seed), *pair))
        else:
            started.append(rv.redistribute(shard_of(rank, pair[0], seed), *pair, async_op=True))
    pending = [call for call in started if not isinstance(call, Tensor)]
    # The last call first, because any order of waits is allowed.
    waited = {id(call): call.wait() for call in reversed(pending)}
    results = [waited.get(id(call), call) for call in started]
    return [result.numpy() for result in results], [call.is_completed() for call in pending]


def test_many_calls_may_be_pending(worlds: Worlds) -> None:
    src, dst = rv.Layout(SHAPE, "R(1)V(2)D(2,1)"), rv.Layout(SHAPE, "R(2)V(1)D(1,2)")
    seen = worlds(4).run(call_async, 9)
    by_call = list(zip(*(results for results, _ in seen), strict=True))
    assert [faults_of(by_call[seed], src, dst, seed) for seed in range(1, 9, 2)] == [[]] * 4
    assert [faults_of(by_call[seed], dst, src, seed) for seed in range(0, 9, 2)] == [[]] * 5
    assert [done for _, done in seen] == [[True] * 8] * 4


def call_async_with_out(rank: int) -> tuple[bool, Any]:
    src, dst = rv.Layout(SHAPE, "R(1)V(1)D(4,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,4)")
    out = torch.empty(dst.cell(rank).box.shape)
    result = rv.redistribute(shard_of(rank, src), src, dst, out=out, async_op=True).wait()
    return result is out, out.numpy()


def test_pending_call_fills_out(worlds: Worlds) -> None:
    src, dst = rv.Layout(SHAPE, "R(1)V(1)D(4,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,4)")
    are_out, results = zip(*worlds(4).run(call_async_with_out), strict=True)
    assert are_out == (True,) * 4
    assert faults_of(results, src, dst) == []


OVERLAPPING = [
    (rv.Layout((12,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((12,), "R(1)V(1)D(2)", [2, 3])),
    (rv.Layout((12,), "R(1)V(1)D(4)"), rv.Layout((12,), "R(4)V(1)D(1)")),
    (rv.Layout((12,), "R(1)V(2)D(1)", [3, 1]), rv.Layout((12,), "R(2)V(1)D(1)", [1, 3])),
]
"""Transitions of different ranks, which start and end their calls at different times."""


def call_async_among_some(rank: int, num_rounds: int) -> list[Any]:
    pending: list[Any] = []
    for seed in range(num_rounds):
        for src, dst in OVERLAPPING:
            if rank in src or rank in dst:
                shard = shard_of(rank, src, seed)
                pending.append(rv.redistribute(shard, src, dst, async_op=True))
            else:
                pending.append(None)
    results = [call and call.wait() for call in pending]
    return [None if result is None else result.numpy() for result in results]


def test_calls_of_overlapping_groups_of_ranks_may_be_pending(worlds: Worlds) -> None:
    calls = enumerate(zip(*worlds(4).run(call_async_among_some, 20), strict=True))
    faults = [faults_of(results, *OVERLAPPING[i % 3], seed=i // 3) for i, results in calls]
    assert faults == [[]] * 60


# --- texts and dtypes ---------------------------------------------------------------------------


def call_with_texts(
    rank: int, src: rv.Layout, dst: rv.Layout, shape: tuple[int, ...] | None
) -> Any:
    tensor = shard_of(rank, src)
    return rv.redistribute(tensor, str(src.rvd), str(dst.rvd), shape=shape).numpy()


@pytest.mark.parametrize(
    "src_rvd, dst_rvd, is_inferred",
    [(*pair, i % 2 == 0) for i, pair in enumerate(TRANSITIONS[:5])],
)
def test_texts_without_ranks_use_all_ranks_of_the_group(
    worlds: Worlds, src_rvd: str, dst_rvd: str, is_inferred: bool
) -> None:
    src, dst = pair_of(src_rvd, dst_rvd)
    results = worlds(4).run(call_with_texts, src, dst, None if is_inferred else SHAPE)
    assert faults_of(results, src, dst) == []


def call_with_whole_texts(rank: int, src: str, dst: str) -> Any:
    return rv.redistribute(shard_of(rank, rv.Layout.parse(src)), src, dst).numpy()


def test_texts_may_include_shape_ranks_and_cuts(worlds: Worlds) -> None:
    src = "R(1)V(2)D(2,1) shape(6,10) ranks(3,1,0,2)"
    dst = "R(1)V(1)D(1,4) shape(6,10) ranks(1,0,3,2) cuts(0,6;0,1,5,5,10)"
    results = worlds(4).run(call_with_whole_texts, src, dst)
    assert faults_of(results, rv.Layout.parse(src), rv.Layout.parse(dst)) == []


def infer_shapes(rank: int, sizes: list[int]) -> list[Any]:
    """Calls by the same texts; by the chunk rule some ranks pass equal shards in all."""
    layouts = [rv.Layout((size,), "R(1)V(1)D(4)") for size in sizes]
    shards = [
        shard_of(rank, layout, seed=size) for layout, size in zip(layouts, sizes, strict=True)
    ]
    return [rv.redistribute(x, "R(1)V(1)D(4)", "R(4)V(1)D(1)").numpy() for x in shards]


def test_shape_is_inferred_again_if_only_some_shards_change_their_shape(worlds: Worlds) -> None:
    # Shards of 11 elements are 3, 3, 3, 2; of 10 they are 3, 3, 3, 1.
    sizes = [11, 10, 11, 10]
    calls = zip(*worlds(4, timeout_secs=3.0).run(infer_shapes, sizes), strict=True)
    for size, results in zip(sizes, calls, strict=True):
        pair = rv.Layout((size,), "R(1)V(1)D(4)"), rv.Layout((size,), "R(4)V(1)D(1)")
        assert faults_of(results, *pair, seed=size) == []


def call_with_two_dtypes(rank: int) -> list[Any]:
    src, dst = rv.Layout((8,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((8,), "R(1)V(1)D(2)", [2, 3])
    results = []
    for dtype in ("float32", "int64", "float32"):
        as_torch = getattr(torch, dtype)
        shard = shard_of(rank, src, dtype=dtype)
        results.append(rv.redistribute(shard, src, dst, dtype=as_torch))
    return [None if r is None else (str(r.dtype), r.numpy()) for r in results]


def test_dtype_argument_selects_the_call_on_ranks_without_a_shard(worlds: Worlds) -> None:
    seen = worlds(4).run(call_with_two_dtypes)
    assert seen[:2] == [[None] * 3] * 2
    assert [name for name, _ in seen[2]] == ["torch.float32", "torch.int64", "torch.float32"]
    src, dst = rv.Layout((8,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((8,), "R(1)V(1)D(2)", [2, 3])
    results = [None, None, seen[2][1][1], seen[3][1][1]]
    assert faults_of(results, src, dst, dtype="int64") == []


# --- autograd and inference ---------------------------------------------------------------------


def call_without_grad(rank: int) -> tuple[Any, bool]:
    src, dst = rv.Layout(SHAPE, "R(1)V(4)D(1,1)"), rv.Layout(SHAPE, "R(4)V(1)D(1,1)")
    tensor = shard_of(rank, src).requires_grad_()
    with torch.no_grad():
        result = rv.redistribute(tensor, src, dst)
    return result.numpy(), result.requires_grad


def test_tensor_may_require_grad_under_no_grad(worlds: Worlds) -> None:
    src, dst = rv.Layout(SHAPE, "R(1)V(4)D(1,1)"), rv.Layout(SHAPE, "R(4)V(1)D(1,1)")
    results, require = zip(*worlds(4).run(call_without_grad), strict=True)
    assert faults_of(results, src, dst) == []
    assert require == (False,) * 4


def call_in_and_after_inference_mode(rank: int, src: rv.Layout, dst: rv.Layout) -> list[Any]:
    with torch.inference_mode():
        first = rv.redistribute(shard_of(rank, src), src, dst).clone()
    return [first.numpy(), rv.redistribute(shard_of(rank, src), src, dst).numpy()]


@pytest.mark.parametrize("src_rvd, dst_rvd", TRANSITIONS)
def test_calls_work_in_inference_mode_and_after_it(
    worlds: Worlds, src_rvd: str, dst_rvd: str
) -> None:
    src, dst = pair_of(src_rvd, dst_rvd)
    world = worlds(4, timeout_secs=4.0)
    first, second = zip(*world.run(call_in_and_after_inference_mode, src, dst), strict=True)
    assert faults_of(first, src, dst) == []
    assert faults_of(second, src, dst) == []


# --- groups -------------------------------------------------------------------------------------


def call_in_two_groups(rank: int, members: list[list[int]]) -> tuple[int, Any]:
    """Every rank calls in its own group, at the same time, with layouts of the group's ranks."""
    groups = [dist.new_group(ranks) for ranks in members]
    (mine,) = [i for i, ranks in enumerate(members) if rank in ranks]
    src, dst = _pair_of_group(mine, members)
    in_group = dist.get_rank(groups[mine])
    results = [
        rv.redistribute(shard_of(in_group, src, seed), src, dst, group=groups[mine]).numpy()
        for seed in range(3)
    ]
    return in_group, results[2]


def _pair_of_group(index: int, members: list[list[int]]) -> tuple[rv.Layout, rv.Layout]:
    size = len(members[index])
    if index == 0:
        return rv.Layout((size * 2, 5), f"R(1)V(1)D({size},1)"), rv.Layout(
            (size * 2, 5), f"R({size})V(1)D(1,1)"
        )
    return rv.Layout((7,), f"R(1)V({size})D(1)"), rv.Layout((7,), f"R(1)V(1)D({size})")


@pytest.mark.parametrize("members", [[[0, 1, 2], [3, 4, 5]], [[5, 1], [0, 3, 2, 4]]], ids=str)
def test_two_groups_may_call_at_the_same_time(worlds: Worlds, members: list[list[int]]) -> None:
    seen = worlds(6).run(call_in_two_groups, members)
    for index, ranks in enumerate(members):
        results = dict(seen[rank] for rank in ranks)
        in_order = [results[i] for i in range(len(ranks))]
        assert faults_of(in_order, *_pair_of_group(index, members), seed=2) == []


def call_in_groups_that_share_a_rank(rank: int) -> dict[str, Any]:
    """Rank 1 is in both groups, every other rank in one."""
    members = {"low": [0, 1], "high": [1, 2, 3]}
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()}
    results = {}
    for name, ranks in members.items():
        if rank in ranks:
            size = len(ranks)
            src = rv.Layout((9,), f"R(1)V(1)D({size})")
            dst = rv.Layout((9,), f"R({size})V(1)D(1)")
            shard = shard_of(ranks.index(rank), src)
            results[name] = rv.redistribute(shard, src, dst, group=groups[name]).numpy()
    return results


def test_a_rank_may_be_in_several_groups(worlds: Worlds) -> None:
    seen = worlds(4).run(call_in_groups_that_share_a_rank)
    for name, ranks in {"low": [0, 1], "high": [1, 2, 3]}.items():
        size = len(ranks)
        pair = rv.Layout((9,), f"R(1)V(1)D({size})"), rv.Layout((9,), f"R({size})V(1)D(1)")
        assert faults_of([seen[rank][name] for rank in ranks], *pair) == []


def call_in_descending_group(rank: int) -> tuple[int, Any, Any]:
    group = dist.new_group([3, 2, 1, 0])
    in_group = dist.get_rank(group)
    src = rv.Layout((7,), "R(1)V(2)D(2)", [3, 2, 1, 0])
    dst = rv.Layout((7,), "R(1)V(1)D(4)", [1, 3, 0, 2])
    by_layout = rv.redistribute(shard_of(in_group, src), src, dst, group=group)
    whole = rv.Layout((7,), "R(1)V(1)D(4)")
    by_text = rv.redistribute(
        shard_of(in_group, whole), "R(1)V(1)D(4)", "R(4)V(1)D(1)", group=group
    )
    return in_group, by_layout.numpy(), by_text.numpy()


def test_layouts_number_ranks_as_the_group_does(worlds: Worlds) -> None:
    src = rv.Layout((7,), "R(1)V(2)D(2)", [3, 2, 1, 0])
    dst = rv.Layout((7,), "R(1)V(1)D(4)", [1, 3, 0, 2])
    seen = sorted(worlds(4).run(call_in_descending_group), key=lambda item: item[0])
    assert faults_of([by_layout for _, by_layout, _ in seen], src, dst) == []
    whole = rv.Layout((7,), "R(1)V(1)D(4)"), rv.Layout((7,), "R(4)V(1)D(1)")
    assert faults_of([by_text for _, _, by_text in seen], *whole) == []


def call_in_group_made_again(rank: int, src: rv.Layout, dst: rv.Layout) -> list[Any]:
    results = []
    for seed in range(3):
        group = dist.new_group([0, 1, 2, 3])
        result = rv.redistribute(shard_of(rank, src, seed), src, dst, group=group)
        dist.destroy_process_group(group)
        results.append(result.numpy())
    return results


def test_group_may_be_destroyed_and_created_again(worlds: Worlds) -> None:
    src, dst = pair_of(*TRANSITIONS[3])
    calls = zip(*worlds(4).run(call_in_group_made_again, src, dst), strict=True)
    assert [faults_of(results, src, dst, seed) for seed, results in enumerate(calls)] == [[]] * 3


def call_outside_of_group(rank: int) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        return ""
    layout = rv.Layout((4,), "R(1)V(1)D(2)")
    return error_of(lambda: rv.redistribute(None, layout, layout, group=group))


def test_call_outside_of_the_group_is_an_error(worlds: Worlds) -> None:
    message = "CommError: this rank is not a member of the group that was given."
    assert worlds(4).run(call_outside_of_group) == ["", "", message, message]


def move_between_users_collectives(rank: int, src: rv.Layout, dst: rv.Layout) -> Any:
    """Collectives of the caller run before, during and after the call."""
    before = torch.full((50_000,), float(rank))
    work = dist.all_reduce(before, async_op=True)
    result = rv.redistribute(shard_of(rank, src), src, dst)
    after = torch.tensor(float(rank))
    dist.all_reduce(after)
    work.wait()
    return result.numpy(), before[7].item(), after.item()


def test_collectives_of_the_caller_do_not_mix_with_those_of_redistribute(worlds: Worlds) -> None:
    src, dst = pair_of(*TRANSITIONS[0])
    seen = worlds(4).run(move_between_users_collectives, src, dst)
    assert faults_of([result for result, _, _ in seen], src, dst) == []
    assert [sums for _, *sums in seen] == [[6.0, 6.0]] * 4


# --- many calls ---------------------------------------------------------------------------------


def count_agreements(rank: int, num_calls: int) -> list[int]:
    src, dst = rv.Layout((12,), "R(1)V(1)D(4)"), rv.Layout((12,), "R(2)V(2)D(1)")
    world = World.of()
    counts = [sum(world.num_agreements.values())]
    for seed in range(num_calls):
        rv.redistribute(shard_of(rank, src, seed), src, dst)
        counts.append(sum(world.num_agreements.values()) - counts[0])
    return counts[1:]


def test_ranks_agree_only_in_the_first_call_of_a_transition(worlds: Worlds) -> None:
    seen = worlds(4).run(count_agreements, 5)
    # Ranks that share memory also agree about the memory, so some ranks agree more often.
    assert all(counts == [counts[0]] * 5 for counts in seen)
    assert min(counts[0] for counts in seen) > 0


def count_store_calls(rank: int, num_calls: int) -> int:
    """Number of accesses to the store by repeated calls of a transition."""
    src, dst = rv.Layout((20,), "R(1)V(1)D(4)"), rv.Layout((20,), "R(1)V(4)D(1)")
    rv.redistribute(shard_of(rank, src), src, dst)
    used: list[int] = []
    original = World.store
    World.store = property(lambda self: used.append(1) or original.fget(self))
    try:
        for _ in range(num_calls):
            rv.redistribute(shard_of(rank, src), src, dst)
    finally:
        World.store = original
    return len(used)


def test_repeated_calls_do_not_access_the_store(worlds: Worlds) -> None:
    assert worlds(4).run(count_store_calls, 5) == [0] * 4


def interleave(rank: int, pairs: list[tuple[rv.Layout, rv.Layout]], num_rounds: int) -> list[Any]:
    results = []
    for seed in range(num_rounds):
        for src, dst in pairs:
            if rank in src or rank in dst:
                results.append(rv.redistribute(shard_of(rank, src, seed), src, dst))
            else:
                results.append(None)
    return [None if result is None else result.numpy() for result in results]


def test_calls_of_several_transitions_may_be_interleaved(worlds: Worlds) -> None:
    shape = (6, 10)
    pairs = [
        (rv.Layout(shape, "R(1)V(2)D(2,1)"), rv.Layout(shape, "R(2)V(1)D(1,2)", [3, 1, 0, 2])),
        (rv.Layout(shape, "R(1)V(1)D(1,3)", [3, 0, 2]), rv.Layout(shape, "R(1)V(2)D(1,1)", [1, 3])),
    ]
    calls = list(zip(*worlds(4).run(interleave, pairs, 50), strict=True))
    faults = [faults_of(results, *pairs[i % 2], seed=i // 2) for i, results in enumerate(calls)]
    assert faults == [[]] * 100


# --- Redistributor ------------------------------------------------------------------------------


def call_redistributor(rank: int, plan: rv.Plan, num_calls: int) -> tuple[list[Any], int]:
    redistributor = rv.Redistributor(plan)
    results = [redistributor(shard_of(rank, plan.src, seed)) for seed in range(num_calls)]
    return [None if r is None else r.numpy() for r in results], redistributor.sent_bytes


@pytest.mark.parametrize("memory_limit", [None, 2200, 1600], ids=str)
def test_redistributor_is_correct_in_repeated_calls(
    worlds: Worlds, memory_limit: int | None
) -> None:
    src = rv.Layout((12, 16), "R(1)V(2)D(2,1)")
    dst = rv.Layout((12, 16), "R(2)V(1)D(1,2)", [1, 0, 3, 2])
    plan = rv.plan(src, dst, "float32", memory_limit=memory_limit)
    seen = worlds(4).run(call_redistributor, plan, 3)
    calls = zip(*(results for results, _ in seen), strict=True)
    assert [faults_of(results, src, dst, seed) for seed, results in enumerate(calls)] == [[]] * 3
    assert sum(sent_bytes for _, sent_bytes in seen) == plan.cost.wire_bytes


def call_redistributor_with_everything(rank: int, plan: rv.Plan) -> tuple[bool, Any]:
    redistributor = rv.Redistributor(plan)
    out = strided(torch.zeros(plan.dst.cell(rank).box.shape))
    tensor = transposed(shard_of(rank, plan.src))
    result = redistributor(tensor, out=out, async_op=True).wait()
    return result is out, out.numpy().copy()


def test_redistributor_accepts_strides_out_and_async_op(worlds: Worlds) -> None:
    src, dst = pair_of(*TRANSITIONS[3])
    seen = worlds(4).run(call_redistributor_with_everything, rv.plan(src, dst))
    assert [is_out for is_out, _ in seen] == [True] * 4
    assert faults_of([result for _, result in seen], src, dst) == []


@pytest.mark.parametrize("executor", ["dist", "auto"])
@pytest.mark.parametrize(
    "src_rvd, dst_rvd",
    [("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"), ("R(1)V(4)D(1,1)", "R(1)V(1)D(1,4)")],
)
def test_tensors_may_have_any_strides_if_the_plan_has_a_view(
    worlds: Worlds, src_rvd: str, dst_rvd: str, executor: str
) -> None:
    src, dst = rv.Layout((8, 12), src_rvd), rv.Layout((8, 12), dst_rvd)
    hosts = rv.Topology.hosts([(0, 1), (2, 3)], rv.Link(0, 100.0), rv.Link(0, 1.0))
    plan = rv.plan(src, dst, topology=hosts, executor=executor)
    assert not plan.path.view.is_whole
    seen = worlds(4).run(call_redistributor_with_everything, plan)
    assert [is_out for is_out, _ in seen] == [True] * 4
    assert faults_of([result for _, result in seen], src, dst) == []


def call_redistributor_outside(rank: int, plan: rv.Plan) -> Any:
    result = rv.Redistributor(plan)(shard_of(rank, plan.src))
    return None if result is None else result.numpy()


def test_redistributor_does_nothing_on_a_rank_outside_both_layouts(worlds: Worlds) -> None:
    src = rv.Layout((6,), "R(1)V(1)D(2)", [0, 1])
    dst = rv.Layout((6,), "R(1)V(1)D(2)", [1, 3])
    results = worlds(4).run(call_redistributor_outside, rv.plan(src, dst))
    assert faults_of(results, src, dst) == []


# --- redistribute_many --------------------------------------------------------------------------


def move_many(rank: int, layouts: dict[str, tuple[rv.Layout, rv.Layout]]) -> dict[str, Any]:
    results = rv.redistribute_many(
        {name: shard_of(rank, src, len(name)) for name, (src, _) in layouts.items()},
        {name: src for name, (src, _) in layouts.items()},
        {name: dst for name, (_, dst) in layouts.items()},
    )
    return {name: None if r is None else r.numpy() for name, r in results.items()}


def test_every_tensor_of_a_state_dict_is_redistributed(worlds: Worlds) -> None:
    everyone = range(4)
    layouts = {
        "weight": (
            rv.Layout((6, 10), "R(1)V(1)D(4,1)", everyone),
            rv.Layout((6, 10), "R(2)V(1)D(1,2)", everyone),
        ),
        "bias": (
            rv.Layout((7,), "R(1)V(4)D(1)", everyone),
            rv.Layout((7,), "R(4)V(1)D(1)", everyone),
        ),
        "step": (rv.Layout((), "R(4)V(1)D()"), rv.Layout((), "R(4)V(1)D()", [3, 2, 1, 0])),
    }
    seen = worlds(4).run(move_many, layouts)
    faults = {
        name: faults_of([results[name] for results in seen], *layouts[name], seed=len(name))
        for name in layouts
    }
    assert faults == {"weight": [], "bias": [], "step": []}


def move_many_unequal(rank: int) -> str:
    layout = rv.Layout((4,), "R(1)V(1)D(4)")
    shard = shard_of(rank, layout)
    return error_of(
        lambda: rv.redistribute_many(
            {"a": shard, "b": shard}, {"a": layout, "c": layout}, {"a": layout, "b": layout}
        )
    )


def test_state_dicts_with_unequal_names_are_an_error_on_every_rank(worlds: Worlds) -> None:
    message = "LayoutError: redistribute_many: src and dst differ in the names ['b', 'c']."
    assert worlds(4).run(move_many_unequal) == [message] * 4


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dst_rvd", [str(rvd) for rvd in all_rvds(4, 1)])
def test_large_shards_are_moved(worlds: Worlds, dst_rvd: str) -> None:
    # Larger than what a socket buffers, so that ranks that only send would block each other.
    src, dst = rv.Layout((1 << 19,), "R(1)V(2)D(2)"), rv.Layout((1 << 19,), dst_rvd)
    assert faults_of(worlds(4).run(move, src, dst), src, dst) == []
