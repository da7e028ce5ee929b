"""On GPUs: several ranks redistribute tensors by NCCL and by CUDA IPC.

The ranks share the available GPUs. The tests check data and order, not speed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import rvdcomm as rv
from rvdcomm.native import core
from tests.covering import each_value
from tests.dist.shards import faults_of, shard_of
from tests.dist.world import ProcessWorld
from tests.oracle import Array, all_pairs

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here"),
    pytest.mark.skipif(core is None or not core.has_cuda, reason="built without CUDA"),
]

NUM_CASES = 40
NUM_CALLS = 3
DTYPES = ["float32", "bfloat16", "int64"]
Case = tuple[rv.Layout, rv.Layout]


def cases_of(num_ranks: int) -> list[Case]:
    """Pairs of one group, and pairs whose groups overlap or have other sizes."""
    rng = random.Random(num_ranks)
    pairs = list(all_pairs((12, 20), num_ranks))
    found = rng.sample(pairs, min(NUM_CASES, len(pairs)))
    for _, dst in list(found):
        ranks = rng.sample(range(num_ranks), rng.randint(1, num_ranks - 1))
        rvd = rng.choice([f"R({len(ranks)})V(1)D(1,1)", f"R(1)V(1)D(1,{len(ranks)})"])
        found.append((rv.Layout((12, 20), rvd, ranks), dst))
    return found


def moved(rank: int, cases: list[Case], executor: str, dtype: str) -> list[Array | None]:
    """This rank's results; each transition is compiled once and called several times."""
    found: list[Array | None] = []
    for src, dst in cases:
        if rank not in src and rank not in dst:
            found.append(None)
            continue
        topology = rv.Topology.single_host(1 + max(src.ranks + dst.ranks), 0, 1.0)
        call = rv.Redistributor(rv.plan(src, dst, dtype, topology), executor=executor)
        shard = shard_of(rank, src, dtype="int8")
        tensor = None if shard is None else shard.to(getattr(torch, dtype)).cuda()
        for _ in range(NUM_CALLS):
            out = call(tensor)
        found.append(None if out is None else out.float().cpu().numpy())
    return found


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    made = ProcessWorld(request.param, 60.0, "nccl")
    yield made
    made.stop()


@each_value(dtype=DTYPES, executor=["peer", "dist"])
def test_ranks_on_gpus_produce_the_shards_of_the_dst_layout(
    world: ProcessWorld, executor: str, dtype: str
) -> None:
    cases = cases_of(world.num_ranks)
    results = world.run(moved, cases, executor, dtype, timeout_secs=100.0)
    found = {}
    for i, (src, dst) in enumerate(cases):
        faults = faults_of([result[i] for result in results], src, dst, dtype="int8")
        if faults:
            found[f"{src.rvd} {src.ranks} -> {dst.rvd} {dst.ranks}"] = faults
    assert found == {}


def called_in_a_row(rank: int, src: rv.Layout, dst: rv.Layout, executor: str) -> bool:
    """Whether consecutive calls are right while the same stream changes their input."""
    topology = rv.Topology.single_host(len(src.ranks), 0, 1.0)
    call = rv.Redistributor(rv.plan(src, dst, "float32", topology), executor=executor)
    shape = src.cell(rank).box.shape
    tensor, outs = torch.zeros(shape, device="cuda"), []
    for value in range(20):
        tensor.fill_(value)
        outs.append(call(tensor))
    return all((out == value).all().item() for value, out in enumerate(outs))


@pytest.mark.parametrize("executor", ["peer", "dist"])
def test_consecutive_calls_do_not_overtake_each_other(world: ProcessWorld, executor: str) -> None:
    n = world.num_ranks
    src = rv.Layout((1024 * n, 64 * n), f"R(1)V(1)D({n},1)")
    dst = rv.Layout((1024 * n, 64 * n), f"R(1)V(1)D(1,{n})")
    results = world.run(called_in_a_row, src, dst, executor, timeout_secs=100.0)
    assert results == [True] * n


NUM_MICROBATCHES = 8


def as_in_a_pipeline(rank: int) -> list[float]:
    """Rank 0 sends down and rank 1 sends up, as in 1F1B; their orders of calls differ.

    The messages are so large that a send waits for its receive.
    """
    here, there = (rv.Layout((4096, 1024), "R(1)V(1)D(1,1)", [r]) for r in (0, 1))
    down, up = (rv.Redistributor(rv.plan(*ends)) for ends in ((here, there), (there, here)))
    for call in (down, up):
        call.prepare_post()
        assert call.is_posted

    def begun(call: rv.Redistributor, value: int | None) -> rv.Pending:
        shard = None if value is None else torch.full((4096, 1024), float(value), device="cuda")
        pending: rv.Pending = call(shard, requires_grad=False, async_op=True)
        return pending

    numbers = range(NUM_MICROBATCHES)
    if rank == 0:
        sent = [begun(down, 0)]
        results = []
        for number in numbers:
            if number + 1 < NUM_MICROBATCHES:
                sent.append(begun(down, number + 1))
            results.append(begun(up, None).wait())
        assert [call.wait() for call in sent] == [None] * NUM_MICROBATCHES
    else:
        results, sent = [], []
        for number in numbers:
            results.append(begun(down, None).wait())
            sent.append(begun(up, 100 + number))
        assert [call.wait() for call in sent] == [None] * NUM_MICROBATCHES
    assert all((result == result[0, 0]).all().item() for result in results)
    return [result[0, 0].item() for result in results]


def test_messages_in_opposite_directions_do_not_deadlock() -> None:
    world = ProcessWorld(2, 60.0, "nccl")
    try:
        found = world.run(as_in_a_pipeline, timeout_secs=100.0)
    finally:
        world.stop()
    numbers = range(NUM_MICROBATCHES)
    assert found == [[100.0 + i for i in numbers], [float(i) for i in numbers]]
