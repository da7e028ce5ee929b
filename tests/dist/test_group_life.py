"""Groups that are destroyed, used by threads, inherited by forks, cut off from the store."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm import native
from rvdcomm.run.world import World
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.test_dist_errors import Waited, longest_secs, timed
from tests.dist.world import Worlds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

EXECUTORS = ("dist", "peer")
SHAPE = (54, 36)


def pair(num_ranks: int, src: str = "R(1)V({})D(1,1)", dst: str = "R({})V(1)D(1,1)") -> Any:
    return rv.Layout(SHAPE, src.format(num_ranks)), rv.Layout(SHAPE, dst.format(num_ranks))


def call(rank: int, executor: str, group: Any = None, seed: int = 0, **options: Any) -> Any:
    src, dst = pair(dist.get_world_size())
    shard = shard_of(rank, src, seed)
    return rv.redistribute(shard, src, dst, group=group, executor=executor, **options)


def new_group(timeout_secs: float = 20.0) -> Any:
    ranks = list(range(dist.get_world_size()))
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout_secs))


# --- threads ------------------------------------------------------------------------------------


def call_in_threads(rank: int, executor: str, num_rounds: int) -> list[list[Any]]:
    """Two threads, each with a group of its own, whose first calls fall together."""
    found = []
    for seed in range(num_rounds):
        groups = [new_group(), new_group()]
        results: list[Any] = [None, None]

        def use(i: int, groups: list[Any], results: list[Any], seed: int) -> None:
            results[i] = call(rank, executor, groups[i], seed).numpy()

        threads = [threading.Thread(target=use, args=(i, groups, results, seed)) for i in (0, 1)]
        # The other rank starts its threads in reverse order.
        for thread in threads if rank == 0 else threads[::-1]:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(results)
        dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_threads_may_make_the_first_calls_of_their_groups_concurrently(
    worlds: Worlds, executor: str
) -> None:
    of_ranks = worlds(2).run(call_in_threads, executor, 6)
    for seed, of_round in enumerate(zip(*of_ranks, strict=True)):
        for results in zip(*of_round, strict=True):
            assert faults_of(results, *pair(2), seed=seed) == []


# --- forks --------------------------------------------------------------------------------------


def in_child(function: Callable[[], Any]) -> Any:
    """The result of ``function`` in a forked child."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, json.dumps(function()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def fork_among_calls(rank: int, executor: str, is_known: bool) -> tuple[dict[str, str], Any]:
    """The errors of a child's calls, and what the parent's next call gives."""
    group = new_group(8.0)
    src, dst = pair(2)
    calls: dict[str, Callable[[], Any]] = {
        "first call": lambda: call(rank, executor, group, dtype=torch.float32),
        "many": lambda: rv.redistribute_many(
            {"a": shard_of(rank, src)}, {"a": src}, {"a": dst}, group=group, executor=executor
        ),
        "async": lambda: call(rank, executor, group, async_op=True).wait(),
        "made in the child": lambda: rv.Redistributor(rv.plan(src, dst), group, executor=executor)(
            shard_of(rank, src)
        ),
    }
    if is_known:
        made = rv.Redistributor(rv.plan(src, dst), group, executor=executor)
        calls["later call"] = lambda: call(rank, executor, group)
        calls["made before"] = lambda: made(shard_of(rank, src))
        for name in ("later call", "made before", "async", "many"):
            calls[name]()
    errors = in_child(lambda: {name: error_of(made) for name, made in calls.items()})
    dist.barrier()
    return errors, call(rank, executor, group, seed=1).numpy()


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_calls_raise_comm_error_in_a_forked_child_and_succeed_in_its_parent(
    worlds: Worlds, executor: str, is_known: bool
) -> None:
    errors, results = zip(*worlds(2).run(fork_among_calls, executor, is_known), strict=True)
    wanted = (
        "CommError: this process was forked from one that is in the process group, and is no rank "
        "of it. Call rvdcomm in a process that was started by the spawn method and joined a group "
        "of its own."
    )
    for of_rank in errors:
        assert set(of_rank.values()) == {wanted}
    assert faults_of(results, *pair(2), seed=1) == []


# --- what stays of a group ----------------------------------------------------------------------


def held() -> dict[str, int]:
    """Descriptors, threads, and mappings of shared memory of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": maps.count("memfd:rvdcomm"),
    }


def make_and_destroy(rank: int, executor: str, folder: str, num_cycles: int) -> Any:
    """What is held after each cycle of init, one call, destroy."""
    size = dist.get_world_size()
    found = []
    for i in range(num_cycles):
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{executor}{i}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        del store
        call(rank, executor)
        dist.barrier()
        found.append(held())
    return found


def make_and_destroy_groups(rank: int, executor: str, folder: str, num_cycles: int) -> Any:
    """What is held after each cycle of new_group, one call, destroy."""
    found = []
    for _ in range(num_cycles):
        group = new_group()
        call(rank, executor, group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        found.append(held())
    return found


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("cycle", [make_and_destroy, make_and_destroy_groups])
def test_destroyed_groups_leave_no_descriptors_threads_or_mappings(
    worlds: Worlds, tmp_path: Path, cycle: Callable[..., Any], executor: str
) -> None:
    world = worlds(2)
    of_ranks = world.run(cycle, executor, str(tmp_path), 12)
    world.stop()
    for found in of_ranks:
        for name in found[0]:
            counts = [each[name] for each in found]
            # A backend closes its last connections in the background.
            assert max(counts[-3:]) <= max(counts[:3]) + 2, f"{name}: {counts}"


def outgrow(rank: int, num_shapes: int) -> list[int]:
    """Mappings after each of some calls, each of which needs more memory than the one before."""
    size = dist.get_world_size()
    found = []
    for rows in range(1, num_shapes + 1):
        src = rv.Layout((rows * 512, size), f"R(1)V(1)D({size},1)")
        dst = rv.Layout((rows * 512, size), f"R(1)V(1)D(1,{size})")
        rv.redistribute(shard_of(rank, src), src, dst, executor="peer")
        found.append(held()["mappings"])
    return found


def test_mappings_of_outgrown_memory_are_released(worlds: Worlds) -> None:
    for found in worlds(2).run(outgrow, 16):
        assert max(found[1:]) == found[1]


def outgrow_inside_a_call(rank: int) -> Any:
    """As if a call in another thread grew the memory, when a call is bound to the old one."""
    made = rv.Redistributor(rv.plan(*pair(2)), executor="peer")
    program = made._program
    bound = program._native_steps

    def bound_and_outgrown(*args: Any) -> Any:
        steps = bound(*args)
        program._staging.reserve(dict.fromkeys(program._staging.ranks, 8 << 20))
        return steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_native_steps", bound_and_outgrown)
        return made(shard_of(rank, pair(2)[0])).numpy()


def test_a_call_holds_the_memory_that_is_outgrown_while_it_runs(worlds: Worlds) -> None:
    assert faults_of(worlds(2).run(outgrow_inside_a_call), *pair(2)) == []


def destroy_among_calls(rank: int) -> list[str]:
    """Rank 0 destroys the group while its calls wait for rank 1, which makes none of them."""
    group = new_group()
    call(rank, "peer", group)
    errors: list[str] = []
    if rank == 0:
        pending = [call(rank, "peer", group, async_op=True) for _ in range(3)]
        time.sleep(0.2)
        # A default group is closed when it is destroyed, because no call holds it.
        World.of(group).close()
        errors = [error_of(each.wait) for each in pending]
    dist.barrier()
    dist.destroy_process_group(group)
    return errors


def test_calls_under_way_raise_comm_error_when_their_group_is_destroyed(worlds: Worlds) -> None:
    errors, _ = worlds(2).run(destroy_among_calls)
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("CommError: process group ")
        assert "was destroyed" in error


# --- a store that cannot be reached -------------------------------------------------------------

TIMEOUT_SECS = 3.0


def be_cut_off(rank: int, executor: str) -> Waited:
    """Rank 0, which serves the store, stops answering while the others agree."""
    group = new_group(TIMEOUT_SECS)
    dist.barrier()
    if rank == 0:
        wake = f"sleep {2.5 * TIMEOUT_SECS}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    return timed(lambda: call(rank, executor, group))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ranks_that_cannot_reach_the_store_raise_in_time(worlds: Worlds, executor: str) -> None:
    world = worlds(3)
    waited = world.run(be_cut_off, executor)
    world.stop()
    assert [each.error.partition(":")[0] for each in waited] == ["CommError"] * 3
    for each in waited[1:]:
        assert "ranks that serve the store, or others, did not join within 3 s" in each.error
    assert longest_secs(waited) < TIMEOUT_SECS + 5.0


def die_before_agreeing(rank: int) -> Waited:
    call(rank, "peer")
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    src, dst = pair(3, dst="R(1)V(1)D({},1)")
    return timed(lambda: rv.redistribute(shard_of(rank, src), src, dst, executor="peer"))


def test_a_rank_that_dies_before_an_agreement_is_named_at_once(worlds: Worlds) -> None:
    waited = worlds(3).run(die_before_agreeing, dying=[2])
    for each in waited[:2]:
        assert each.error.startswith("CommError: redistribute ")
        assert "rank 2 died (its process ended" in each.error
        assert each.secs < 5.0
