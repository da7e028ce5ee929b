"""Groups of every making: backends by device, joint groups of separate jobs, who dies, who leaves.

Ranks of one job have a default group; here two jobs of two ranks each are joined by one more group,
on a store of its own, as frameworks of reinforcement learning do.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rvdcomm as rv
import rvdcomm.interop.dtensor as rd
from rvdcomm import native
from rvdcomm.run import process_group
from rvdcomm.run.rank_program import RankProgram
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

EXECUTORS = ("dist", "auto")
SHAPE = (6, 10)
SRC, DST = rv.Layout(SHAPE, "R(1)V(1)D(2,1)", [0, 1]), rv.Layout(SHAPE, "R(1)V(1)D(1,2)", [2, 3])
ALL = rv.Layout(SHAPE, "R(1)V(1)D(4,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,4)")


def moved(rank: int, pair: Any, group: Any = None, **options: Any) -> Any:
    src, dst = pair
    found = rv.redistribute(
        shard_of(rank, src), src, dst, group=group, dtype=torch.float32, **options
    )
    return found


# --- backends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend, is_mesh, executor",
    [(None, True, "auto"), ("cpu:gloo,cuda:gloo", False, "dist")],
)
@on_ranks(4, is_last=True)
def test_a_group_moves_tensors_by_the_backend_of_their_device(
    rank: int, tmp_path: Any, backend: str | None, is_mesh: bool, executor: str
) -> None:
    """A call on a default group of a backend, or on the group of a mesh of it."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{tmp_path}/store", 4)
    dist.init_process_group(backend, store=store, rank=rank, world_size=4)
    group = init_device_mesh("cpu", (4,)).get_group() if is_mesh else None
    assert_moved(moved(rank, ALL, group, executor=executor), *ALL)


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(4)
def test_tensors_on_the_cpu_move_by_gloo_in_a_group_that_has_nccl_too(
    rank: int, executor: str
) -> None:
    """The group says that NCCL serves its GPUs."""
    made = process_group._of_torch
    backends = {"cpu": "gloo", "cuda": "nccl"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_of_torch", lambda g: replace(made(g), backends=backends))
        group = dist.new_group(list(range(4)))
        assert_moved(moved(rank, ALL, group, executor=executor), *ALL)
        src, dst = ALL
        shard = shard_of(rank, src)
        many = rv.redistribute_many({"w": shard}, {"w": src}, {"w": dst}, group=group)
        assert_moved(many["w"], *ALL)
        assert_moved(rv.Redistributor(rv.plan(*ALL), group, device="cpu")(shard), *ALL)


# --- joint groups of separate jobs --------------------------------------------------------------


@dataclass
class StatelessProcessGroup:
    """What vLLM's class of this name has besides its methods."""

    rank: int
    world_size: int
    store: Any
    socket: Any = None


def joint_group(kind: str, rank: int, store: Any) -> Any:
    if kind.startswith("stateless"):
        return StatelessProcessGroup(rank, 4, store)
    if kind == "registered":
        made, _ = dist.distributed_c10d._new_process_group_helper(
            4, rank, [], "gloo", store, group_name="weights", timeout=timedelta(seconds=20)
        )
        return made
    made = dist.ProcessGroup(dist.PrefixStore("joint/", store), rank, 4)
    gloo: Any = dist.ProcessGroupGloo
    made._register_backend(
        torch.device("cpu"),
        dist.ProcessGroup.BackendType.GLOO,
        gloo(dist.PrefixStore("gloo/", store), rank, 4, timedelta(seconds=20)),
    )
    return made


def enter_job(rank: int, folder: str, kind: str) -> Any:
    """Leave the default group for that of a job of two ranks; returns the joint group of both."""
    dist.destroy_process_group()
    job, number = divmod(rank, 2)
    if kind != "stateless, no default group":
        store = dist.FileStore(f"{folder}/job{job}", 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        # The jobs have made different numbers of groups, so torch would name the next differently.
        [dist.new_group([0, 1]) for _ in range(job)]
    return joint_group(kind, rank, dist.FileStore(f"{folder}/joint", 4))


@pytest.mark.parametrize("kind", ["registered", "unregistered", "stateless, no default group"])
@on_ranks(4, is_last=True)
def test_separate_jobs_redistribute_over_a_joint_group(rank: int, tmp_path: Any, kind: str) -> None:
    group = enter_job(rank, tmp_path, kind)
    for executor in EXECUTORS:
        found = moved(rank, (SRC, DST), group, executor=executor)
        assert found is None if rank < 2 else torch.equal(found, shard_of(rank, DST))


@on_ranks(4, is_last=True)
def test_dtensors_of_one_job_go_to_meshes_of_another(rank: int, tmp_path: Any) -> None:
    """Both jobs have a mesh of ranks 0 and 1; the first has the tensor, the second gets it."""
    group = enter_job(rank, tmp_path, "registered")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(60.0).view(SHAPE)
    if rank < 2:
        tensor = distribute_tensor(whole, mesh, [Shard(0)])
        assert rd.redistribute_many({"w": tensor}, {}, group=group) == {"w": None}
        return
    target = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)])
    found = rd.redistribute_many({}, {"w": target}, group=group)["w"]
    assert torch.equal(found.full_tensor(), whole)


@on_ranks(4)
def test_ranks_of_a_mesh_are_renumbered_for_the_group(rank: int) -> None:
    """A mesh of ranks 2 and 3, in a group of ranks 1 to 3, which numbers them 1 and 2."""
    group = dist.new_group([1, 2, 3])
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    whole = torch.arange(60.0).view(SHAPE)
    if rank == 1:
        outside = distribute_tensor(whole, meshes[0], [Replicate()], src_data_rank=None)
        with pytest.raises(rv.LayoutError, match=r"group that was given has no ranks \[0\] of the"):
            rd.redistribute(outside, meshes[0], [Shard(0)], group=group)
    if rank >= 2:
        tensor = distribute_tensor(whole, meshes[1], [Shard(0)], src_data_rank=None)
        found = rd.redistribute(tensor, meshes[1], [Shard(1)], group=group)
        assert torch.equal(found.to_local(), whole.chunk(2, 1)[rank - 2])


@on_ranks(4)
def test_global_ranks_in_a_subgroup_are_told_to_be_outside_of_it(rank: int) -> None:
    """The layout names ranks of the default group, in a group of ranks 2 and 3."""
    group = dist.new_group([2, 3])
    layout = rv.Layout((8,), "R(1)V(1)D(2)", [2, 3])
    if rank >= 2:
        error = error_of(partial(rv.redistribute, torch.zeros(4), layout, layout, group=group))
        assert error.endswith("ranks [2, 3] are outside the group, which has ranks 0 to 1.")


# --- ranks that die or leave --------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(4, dying=[2])
def test_a_rank_that_dies_before_the_first_call_is_named(rank: int, executor: str) -> None:
    dist.barrier()
    if rank == 2:
        os._exit(0)
    # The default timeout of worlds is much longer than it takes.
    error = error_of(partial(moved, rank, ALL, executor=executor))
    # This rank is not to be gone before the others look.
    time.sleep(1.0)
    assert error.startswith("CommError: ")
    assert "rank 2 is gone (its process ended" in error


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(4, dying=[0, 2])
def test_ranks_that_end_after_their_first_call_cost_the_others_nothing(
    rank: int, executor: str
) -> None:
    """Ranks 0 and 2 end as soon as their first call has returned; rank 1 connects slowly."""
    made = RankProgram.__init__

    def slow(self: Any, *args: Any) -> None:
        made(self, *args)
        time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(RankProgram, "__init__", slow)
        # Rank 0 serves the store.
        found = moved(rank, ALL, executor=executor)
    if rank in (0, 2):
        os._exit(0)
    assert torch.equal(found, shard_of(rank, ALL[1]))


@on_ranks(4, dying=[0])
def test_a_rank_that_only_sends_learns_that_another_sender_left(rank: int) -> None:
    """Ranks 0 and 1 send to rank 2; rank 0 has left when the others call."""
    dst = rv.Layout(SHAPE, "R(1)V(1)D(1,1)", [2])
    call = partial(moved, rank, (SRC, dst), executor="peer")
    if rank < 3:
        call()
    dist.barrier()
    if rank == 0:
        os._exit(0)
    time.sleep(0.5)
    if rank < 3:
        error = error_of(call)
        assert error.startswith("CommError: ")
        assert "rank 0 died" in error


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(4, dying=[3])
def test_known_calls_go_on_when_the_store_is_lost(rank: int, tmp_path: Any, executor: str) -> None:
    """Rank 3 serves the store of the others, and ends after their first call."""
    dist.destroy_process_group()
    ports = dist.FileStore(f"{tmp_path}/port", 4)
    if rank == 3:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        ports.set("port", str(store.port))
        ports.wait(["done/0", "done/1", "done/2"])
        os._exit(0)
    store = dist.TCPStore("127.0.0.1", int(ports.get("port")), None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    pair = rv.Layout(SHAPE, "R(1)V(1)D(3,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,3)")
    moved(rank, pair, executor=executor)
    ports.set(f"done/{rank}", "")
    time.sleep(1.0)
    error = error_of(partial(moved, rank, pair[::-1], executor=executor))
    assert error.startswith("CommError: ")
    assert "the store of the process group is lost" in error
    assert "frame #" not in error
    assert torch.equal(moved(rank, pair, executor=executor), shard_of(rank, pair[1]))


# --- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(4)
def test_two_threads_that_call_one_group_at_once_both_get_an_error(
    rank: int, executor: str
) -> None:
    """Two threads make calls of one transition with values of their own."""
    group = dist.new_group(list(range(dist.get_world_size())))
    errors = ["", ""]

    def use(i: int) -> None:
        for _ in range(30):
            shard = shard_of(rank, ALL[0], i)
            try:
                rv.redistribute(shard, *ALL, group=group, executor=executor)
            except rv.CommError as error:
                errors[i] = str(error)
                return

    threads = [threading.Thread(target=use, args=(i,)) for i in (0, 1)]
    for thread in threads if rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(errors)
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, errors)
    assert any("two threads call it at once" in error for found in of_ranks for error in found)
