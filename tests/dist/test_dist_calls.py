"""Ways to call ``redistribute``: any strides, out=, async_op, texts, groups, many calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm.plans import with_trees
from rvdcomm.run.world import World
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of
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
Stride = Callable[[Tensor], Tensor]


def pair_of(src_rvd: str, dst_rvd: str) -> tuple[rv.Layout, rv.Layout]:
    return rv.Layout(SHAPE, src_rvd), rv.Layout(SHAPE, dst_rvd)


# --- strides and out= ---------------------------------------------------------------------------


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
    return tensor.new_full((rows + 3, columns), 99)[3:].copy_(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    return tensor


def rest_of_storage(tensor: Tensor) -> float:
    """The sum of the elements of a storage that are not in the tensor."""
    room = torch.tensor(tensor.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32)
    return (room.double().sum() - tensor.double().sum()).item()


STRIDES = (transposed, strided, narrowed, contiguous)


@pytest.mark.parametrize(
    "src_rvd, dst_rvd, stride, stride_of_out",
    [(*pair, STRIDES[i % 3], STRIDES[i % 4 - 1]) for i, pair in enumerate(TRANSITIONS)],
)
@on_ranks(4)
def test_input_and_out_may_have_any_strides_and_no_other_memory_is_written(
    rank: int, src_rvd: str, dst_rvd: str, stride: Stride, stride_of_out: Stride
) -> None:
    src, dst = pair_of(src_rvd, dst_rvd)
    tensor = stride(shard_of(rank, src))
    storage = tensor.untyped_storage().tolist()
    assert_moved(rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS), src, dst)
    out = stride_of_out(torch.full(dst.cell(rank).box.shape, -7.0))
    rest = rest_of_storage(out)
    assert rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS, out=out) is out
    assert_moved(out, src, dst)
    assert rest_of_storage(out) == rest
    assert storage == tensor.untyped_storage().tolist()


@on_ranks(4)
def test_input_may_be_expanded(rank: int) -> None:
    tensor = torch.tensor([[1.0], [2.0], [4.0]]).expand(3, 5)
    moved = rv.redistribute(tensor, "R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", topology=FREE_ROUNDS)
    assert moved.tolist() == [[4.0] * 5, [8.0] * 5, [16.0] * 5]


@pytest.mark.parametrize(
    "src, dst, num_copies, kind",
    [
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", 16, "conj"),
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", 4, "neg"),
        ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", 16, "neg"),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", 4, "conj"),
    ],
)
@on_ranks(4)
def test_input_may_be_a_lazy_conjugate_or_negative(
    rank: int, src: str, dst: str, num_copies: int, kind: str
) -> None:
    """The memory of the tensor holds the conjugate, or the negative, of its values."""
    value = torch.full((4, 4), complex(rank + 1, 10 * rank + 1), dtype=torch.complex64)
    tensor = value.conj() if kind == "conj" else value.conj().imag
    assert tensor.is_conj() or tensor.is_neg()
    # A result has num_copies elements of every rank's value, or of the sum of all values.
    total = num_copies * complex(1 + 2 + 3 + 4, -(1 + 11 + 21 + 31))
    moved = rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS)
    assert moved.sum().item() == (total if kind == "conj" else total.imag)


@pytest.mark.parametrize("network", ["line", "hosts of 3 and 1"])
@on_ranks(4)
def test_networks_are_topologies_too(rank: int, network: str) -> None:
    link = rv.Link(1e-6, 1e9)
    links = (
        rv.Network.preset("line", 4, link=link)
        if network == "line"
        else rv.Network.hosts([[0, 1, 2], [3]], link, [link, rv.Link(1e-5, 1e8)])
    )
    for src, dst in (pair_of(*pair) for pair in TRANSITIONS):
        moved = rv.redistribute(shard_of(rank, src), src, dst, topology=links)
        assert_moved(moved, src, dst)
    src, dst = pair_of(*TRANSITIONS[0])
    tensors = {"a": shard_of(rank, src), "b": shard_of(rank, src)}
    many = rv.redistribute_many(
        tensors, dict.fromkeys(tensors, src), dict.fromkeys(tensors, dst), topology=links
    )
    for moved in many.values():
        assert_moved(moved, src, dst)
    wrong: Any = str(links)
    with pytest.raises(rv.LayoutError, match=r"topology.*a Topology or a Network"):
        rv.redistribute(shard_of(rank, src), src, dst, topology=wrong)


@pytest.mark.parametrize("first", ["has other trees", "has no trees"])
@on_ranks(4)
def test_all_ranks_run_the_trees_of_the_first(
    rank: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = rv.Network.preset("line", 4, link=rv.Link(1e-7, 1e6))
    src, dst = rv.Layout((64, 60), "R(1)V(1)D(4,1)"), rv.Layout((64, 60), "R(4)V(1)D(1,1)")
    plan = rv.plan(src, dst, topology=line)
    assert plan.forest is not None
    ways = plan.forest.to_json()
    other = {**ways, "ways": [[[a, b, way] for a, b, way in each[::-1]] for each in ways["ways"]]}
    if rank == 0:
        mine = None if first == "has no trees" else other
        plan = with_trees(plan, mine)
    run = rv.Redistributor(plan)
    assert (run.plan.forest is None) == (first == "has no trees")
    if run.plan.forest is not None:
        assert run.plan.forest.to_json() == other
    assert_moved(run(shard_of(rank, src)), src, dst)


@pytest.mark.parametrize("executor", ["dist", "peer"])
@on_ranks(4)
def test_trees_run_on_hosts_of_unequal_size(rank: int, executor: str) -> None:
    hosts = rv.Topology.hosts([[0, 1, 2], [3]], rv.Link(1e-6, 1e9), rv.Link(1e-6, 1e8))
    src, dst = rv.Layout((1024, 96), "R(1)V(4)D(1,1)"), rv.Layout((1024, 96), "R(4)V(1)D(1,1)")
    plan = rv.plan(src, dst, topology=hosts, executor=executor)
    assert plan.forest is not None
    assert bool(plan.domains) == (executor != "dist")
    run = rv.Redistributor(plan)
    for _ in range(3):
        assert_moved(run(shard_of(rank, src)), src, dst)


@on_ranks(4)
def test_result_is_new_memory_even_if_nothing_moves(rank: int) -> None:
    layout = rv.Layout((4, 3), "R(1)V(1)D(4,1)")
    tensor = torch.arange(3.0).view(1, 3)
    result = rv.redistribute(tensor, layout, layout)
    result += 1
    assert tensor.tolist() == [[0.0, 1.0, 2.0]]
    assert result.data_ptr() != tensor.data_ptr()


OUTS = {"first call": [[2, 3]], "later call": [[], [2, 3]], "by turns": [[2], [3], [2, 3], []]}
"""Ranks that give ``out`` in each of some calls of one transition."""


@pytest.mark.parametrize("when", OUTS)
@on_ranks(4, timeout_secs=3.0)
def test_some_ranks_may_give_out(rank: int, when: str) -> None:
    # Every case has its own shape, so that it starts with a new transition.
    shape = (8 + len(when),)
    src, dst = rv.Layout(shape, "R(1)V(1)D(2)", [0, 1]), rv.Layout(shape, "R(1)V(1)D(2)", [2, 3])
    for seed, ranks in enumerate(OUTS[when]):
        out = torch.empty(dst.cell(rank).box.shape) if rank in ranks else None
        assert_moved(rv.redistribute(shard_of(rank, src, seed), src, dst, out=out), src, dst, seed)


# --- shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, src, dst",
    [
        ((), "R(1)V(4)D()", "R(4)V(1)D()"),
        ((), "R(1)V(1)D() shape() ranks(2)", "R(4)V(1)D()"),
        ((), "R(4)V(1)D()", "R(1)V(4)D()"),
        ((), "R(1)V(3)D() shape() ranks(3,1,0)", "R(1)V(1)D() shape() ranks(2)"),
        ((2,), "R(1)V(1)D(4)", "R(4)V(1)D(1)"),
        ((2,), "R(1)V(4)D(1)", "R(1)V(1)D(4)"),
        ((9,), "R(1)V(1)D(4) shape(9) cuts(0,0,9,9,9)", "R(1)V(1)D(4) shape(9) cuts(0,9,9,9,9)"),
        ((1, 3), "R(1)V(1)D(2,2)", "R(2)V(1)D(2,1)"),
        ((0,), "R(1)V(1)D(4)", "R(2)V(2)D(1)"),
        ((3, 0), "R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    ],
)
@on_ranks(4)
def test_tensors_of_0_dims_and_empty_shards_are_moved(
    rank: int, shape: tuple[int, ...], src: str, dst: str
) -> None:
    pair = [rv.Layout.parse(x) if "shape" in x else rv.Layout(shape, x) for x in (src, dst)]
    assert_moved(rv.redistribute(shard_of(rank, pair[0]), *pair, topology=FREE_ROUNDS), *pair)


@pytest.mark.parametrize("dst_rvd", [str(rvd) for rvd in all_rvds(4, 1)])
@on_ranks(4)
def test_large_shards_are_moved(rank: int, dst_rvd: str) -> None:
    # Larger than what a socket buffers, so that ranks that only send would block each other.
    src, dst = rv.Layout((1 << 19,), "R(1)V(2)D(2)"), rv.Layout((1 << 19,), dst_rvd)
    assert_moved(rv.redistribute(shard_of(rank, src), src, dst, topology=FREE_ROUNDS), src, dst)


# --- texts, dtypes, and inference ---------------------------------------------------------------


@pytest.mark.parametrize("pair", TRANSITIONS[:5])
@on_ranks(4)
def test_texts_without_ranks_use_all_ranks_of_the_group(rank: int, pair: tuple[str, str]) -> None:
    src, dst = pair_of(*pair)
    shape = SHAPE if TRANSITIONS.index(pair) % 2 else None
    assert_moved(rv.redistribute(shard_of(rank, src), *pair, shape=shape), src, dst)


@on_ranks(4)
def test_texts_may_include_shape_ranks_and_cuts(rank: int) -> None:
    src = "R(1)V(2)D(2,1) shape(6,10) ranks(3,1,0,2)"
    dst = "R(1)V(1)D(1,4) shape(6,10) ranks(1,0,3,2) cuts(0,6;0,1,5,5,10)"
    pair = rv.Layout.parse(src), rv.Layout.parse(dst)
    assert_moved(rv.redistribute(shard_of(rank, pair[0]), src, dst), *pair)


@on_ranks(4, timeout_secs=3.0)
def test_shape_is_inferred_again_if_only_some_shards_change_their_shape(rank: int) -> None:
    # Shards of 11 elements are 3, 3, 3, 2; of 10 they are 3, 3, 3, 1.
    texts = "R(1)V(1)D(4)", "R(4)V(1)D(1)"
    for size in (11, 10, 11, 10):
        src, dst = (rv.Layout((size,), text) for text in texts)
        assert_moved(rv.redistribute(shard_of(rank, src, seed=size), *texts), src, dst, size)


@on_ranks(4)
def test_dtype_argument_selects_the_call_on_ranks_without_a_shard(rank: int) -> None:
    src, dst = rv.Layout((8,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((8,), "R(1)V(1)D(2)", [2, 3])
    for dtype in ("float32", "int64", "float32"):
        shard = shard_of(rank, src, dtype=dtype)
        moved = rv.redistribute(shard, src, dst, dtype=getattr(torch, dtype))
        assert moved is None or moved.dtype == getattr(torch, dtype)
        assert_moved(moved, src, dst, dtype=dtype)


@pytest.mark.parametrize("pair", TRANSITIONS[::2])
@on_ranks(4, timeout_secs=4.0)
def test_calls_work_in_inference_mode_and_after_it(rank: int, pair: tuple[str, str]) -> None:
    src, dst = pair_of(*pair)
    with torch.inference_mode():
        first = rv.redistribute(shard_of(rank, src), src, dst).clone()
    second = rv.redistribute(shard_of(rank, src), src, dst)
    assert_moved(first, src, dst)
    assert_moved(second, src, dst)


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "members",
    [[[0, 1, 2], [3, 4, 5]], [[5, 1], [0, 3, 2, 4]], [[0, 1], [1, 2, 3], [4, 5]]],
    ids=str,
)
@on_ranks(6)
def test_groups_may_call_at_the_same_time_and_share_a_rank(
    rank: int, members: list[list[int]]
) -> None:
    groups = [dist.new_group(ranks) for ranks in members]
    for index, (group, ranks) in enumerate(zip(groups, members, strict=True)):
        if rank not in ranks:
            continue
        size = len(ranks)
        texts = (f"R(1)V(1)D({size})", f"R({size})V(1)D(1)")
        if index:
            texts = (f"R(1)V({size})D(1)", f"R(1)V(1)D({size})")
        src, dst = (rv.Layout((size * 2 + index,), text) for text in texts)
        for seed in range(2):
            shard = shard_of(dist.get_rank(group), src, seed)
            moved = rv.redistribute(shard, src, dst, group=group)
            assert_moved(moved, src, dst, seed, group=group)


@on_ranks(4)
def test_layouts_number_ranks_as_the_group_does(rank: int) -> None:
    group = dist.new_group([3, 2, 1, 0])
    in_group = dist.get_rank(group)
    src = rv.Layout((7,), "R(1)V(2)D(2)", [3, 2, 1, 0])
    dst = rv.Layout((7,), "R(1)V(1)D(4)", [1, 3, 0, 2])
    moved = rv.redistribute(shard_of(in_group, src), src, dst, group=group)
    assert_moved(moved, src, dst, group=group)
    texts = "R(1)V(1)D(4)", "R(4)V(1)D(1)"
    src, dst = (rv.Layout((7,), text) for text in texts)
    moved = rv.redistribute(shard_of(in_group, src), *texts, group=group)
    assert_moved(moved, src, dst, group=group)


@on_ranks(4)
def test_group_may_be_destroyed_and_created_again(rank: int) -> None:
    src, dst = pair_of(*TRANSITIONS[3])
    for seed in range(3):
        group = dist.new_group([0, 1, 2, 3])
        result = rv.redistribute(shard_of(rank, src, seed), src, dst, group=group)
        dist.destroy_process_group(group)
        assert_moved(result, src, dst, seed)


@on_ranks(4)
def test_call_outside_of_the_group_is_an_error(rank: int) -> None:
    group = dist.new_group([0, 1])
    layout = rv.Layout((4,), "R(1)V(1)D(2)")
    if rank >= 2:
        error = error_of(lambda: rv.redistribute(None, layout, layout, group=group))
        assert error == "CommError: this rank is not a member of the group that was given."


@on_ranks(4)
def test_collectives_of_the_caller_do_not_mix_with_those_of_redistribute(rank: int) -> None:
    """Collectives of the caller run before, during and after the call."""
    src, dst = pair_of(*TRANSITIONS[0])
    before = torch.full((50_000,), float(rank))
    work = dist.all_reduce(before, async_op=True)
    result = rv.redistribute(shard_of(rank, src), src, dst)
    after = torch.tensor(float(rank))
    dist.all_reduce(after)
    work.wait()
    assert before[7].item() == after.item() == 6.0
    assert_moved(result, src, dst)


# --- many calls ---------------------------------------------------------------------------------


PAIRS = [
    (rv.Layout(SHAPE, "R(1)V(2)D(2,1)"), rv.Layout(SHAPE, "R(2)V(1)D(1,2)", [3, 1, 0, 2])),
    (rv.Layout(SHAPE, "R(1)V(1)D(1,3)", [3, 0, 2]), rv.Layout(SHAPE, "R(1)V(2)D(1,1)", [1, 3])),
    (rv.Layout((12,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((12,), "R(1)V(1)D(2)", [2, 3])),
    (rv.Layout((12,), "R(1)V(2)D(1)", [3, 1]), rv.Layout((12,), "R(2)V(1)D(1)", [1, 3])),
]
"""Transitions of different ranks, which start and end their calls at different times."""


@pytest.mark.parametrize("pending", ["none", "all", "all but one"])
@on_ranks(4)
def test_calls_of_overlapping_groups_of_ranks_may_be_interleaved_and_pending(
    rank: int, pending: str
) -> None:
    calls = [(pair, seed) for seed in range(15) for pair in PAIRS]
    started: list[Any] = []
    for i, ((src, dst), seed) in enumerate(calls):
        is_pending = pending == "all" or (pending != "none" and i != len(calls) // 2)
        shard = shard_of(rank, src, seed)
        is_mine = rank in src or rank in dst
        started.append(is_mine and rv.redistribute(shard, src, dst, async_op=is_pending))
    # The last call first, because any order of waits is allowed.
    results = [call.wait() if isinstance(call, rv.Pending) else call for call in started[::-1]]
    assert all(call.is_completed() for call in started if isinstance(call, rv.Pending))
    for ((src, dst), seed), result in zip(calls, results[::-1], strict=True):
        assert_moved(None if result is False else result, src, dst, seed)


@on_ranks(4)
def test_ranks_agree_only_in_the_first_call_of_a_transition(rank: int) -> None:
    src, dst = rv.Layout((12,), "R(1)V(1)D(4)"), rv.Layout((12,), "R(2)V(2)D(1)")
    world = World.of()
    counts = [sum(world.num_agreements.values())]
    for seed in range(5):
        rv.redistribute(shard_of(rank, src, seed), src, dst)
        counts.append(sum(world.num_agreements.values()))
    # Ranks that share memory also agree about the memory, so some ranks agree more often.
    assert counts[0] < counts[1]
    assert counts[1:] == [counts[1]] * 5


@on_ranks(4)
def test_repeated_calls_do_not_access_the_store(rank: int) -> None:
    src, dst = rv.Layout((20,), "R(1)V(1)D(4)"), rv.Layout((20,), "R(1)V(4)D(1)")
    rv.redistribute(shard_of(rank, src), src, dst)
    used: list[int] = []
    store = World.store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "store", property(lambda self: used.append(1) or store.fget(self)))
        for _ in range(5):
            rv.redistribute(shard_of(rank, src), src, dst)
    assert used == []


# --- Redistributor ------------------------------------------------------------------------------


@on_ranks(4)
def test_a_saved_plan_runs(rank: int) -> None:
    ring = rv.Network.preset("ring", 4, link=rv.Link(1e-6, 1e9))
    src, dst = (rv.Layout((8192, 4), text) for text in ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"))
    with TemporaryDirectory() as folder:
        rv.plan(src, dst, "float32", ring, executor="dist").save(Path(folder, "plan.json"))
        made = rv.load_plan(Path(folder, "plan.json"))
    assert [step.kind for step in made.path.steps] == ["trees"]
    assert_moved(rv.Redistributor(made)(shard_of(rank, src)), src, dst)


@pytest.mark.parametrize("memory_limit", [None, 2200, 1600], ids=str)
@on_ranks(4)
def test_redistributor_is_correct_in_repeated_calls(rank: int, memory_limit: int | None) -> None:
    src = rv.Layout((12, 16), "R(1)V(2)D(2,1)")
    dst = rv.Layout((12, 16), "R(2)V(1)D(1,2)", [1, 0, 3, 2])
    plan = rv.plan(src, dst, "float32", memory_limit=memory_limit)
    call = rv.Redistributor(plan)
    for seed in range(3):
        assert_moved(call(shard_of(rank, src, seed)), src, dst, seed)
    sent_bytes = torch.tensor(call.sent_bytes)
    dist.all_reduce(sent_bytes)
    assert sent_bytes == plan.cost.wire_bytes


HOSTS = rv.Topology.hosts([(0, 1), (2, 3)], rv.Link(0, 100.0), rv.Link(0, 1.0))


@pytest.mark.parametrize("executor", ["dist", "auto"])
@pytest.mark.parametrize(
    "src_rvd, dst_rvd, has_view",
    [
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", True),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(1,4)", True),
        (*TRANSITIONS[3], False),
    ],
)
@on_ranks(4)
def test_redistributor_accepts_strides_out_and_async_op(
    rank: int, src_rvd: str, dst_rvd: str, has_view: bool, executor: str
) -> None:
    src, dst = rv.Layout((8, 12), src_rvd), rv.Layout((8, 12), dst_rvd)
    plan = rv.plan(src, dst, topology=HOSTS if has_view else None, executor=executor)
    assert plan.path.view.is_whole != has_view
    out = strided(torch.zeros(plan.dst.cell(rank).box.shape))
    tensor = transposed(shard_of(rank, plan.src))
    assert rv.Redistributor(plan)(tensor, out=out, async_op=True).wait() is out
    assert_moved(out, src, dst)


@on_ranks(4)
def test_redistributor_does_nothing_on_a_rank_outside_both_layouts(rank: int) -> None:
    src = rv.Layout((6,), "R(1)V(1)D(2)", [0, 1])
    dst = rv.Layout((6,), "R(1)V(1)D(2)", [1, 3])
    assert_moved(rv.Redistributor(rv.plan(src, dst))(shard_of(rank, src)), src, dst)
