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
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of
from tests.dist.test_dist_errors import Waited, timed
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


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(2)
def test_two_threads_may_make_the_first_calls_of_their_groups_concurrently(
    rank: int, executor: str
) -> None:
    for seed in range(6):
        groups = [new_group(), new_group()]
        results: list[Any] = [None, None]

        def use(i: int, groups: list[Any], results: list[Any], seed: int) -> None:
            results[i] = call(rank, executor, groups[i], seed)

        threads = [threading.Thread(target=use, args=(i, groups, results, seed)) for i in (0, 1)]
        # The other rank starts its threads in reverse order.
        for thread in threads if rank == 0 else threads[::-1]:
            thread.start()
        for thread in threads:
            thread.join()
        for result, group in zip(results, groups, strict=True):
            assert_moved(result, *pair(2), seed=seed)
            dist.destroy_process_group(group)


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


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(2)
def test_calls_raise_comm_error_in_a_forked_child_and_succeed_in_its_parent(
    rank: int, executor: str, is_known: bool
) -> None:
    group = new_group(8.0)
    src, dst = pair(2)
    shard = shard_of(rank, src)
    calls: dict[str, Callable[[], Any]] = {
        "first call": lambda: call(rank, executor, group, dtype=torch.float32),
        "many": lambda: rv.redistribute_many(
            {"a": shard}, {"a": src}, {"a": dst}, group=group, executor=executor
        ),
        "async": lambda: call(rank, executor, group, async_op=True).wait(),
        "made": lambda: rv.Redistributor(rv.plan(src, dst), group, executor=executor)(shard),
    }
    if is_known:
        made = rv.Redistributor(rv.plan(src, dst), group, executor=executor)
        calls["later call"] = lambda: call(rank, executor, group)
        calls["made before"] = lambda: made(shard)
        for name in ("later call", "made before", "async", "many"):
            calls[name]()
    errors = in_child(lambda: [error_of(made) for made in calls.values()])
    assert set(errors) == {
        "CommError: this process was forked from one that is in the process group, and is no rank "
        "of it. Call rvdcomm in a process that was started by the spawn method and joined a group "
        "of its own."
    }
    dist.barrier()
    assert_moved(call(rank, executor, group, seed=1), src, dst, seed=1)


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


def assert_no_growth(found: list[dict[str, int]]) -> None:
    """Check what was held after each of some cycles."""
    for name in found[0]:
        counts = [each[name] for each in found]
        # A backend closes its last connections in the background.
        assert max(counts[-3:]) <= max(counts[:3]) + 2, f"{name}: {counts}"


@pytest.mark.parametrize("is_default, executor", [(False, "dist"), (False, "peer"), (True, "peer")])
@on_ranks(2, is_last=True)
def test_destroyed_groups_leave_no_descriptors_threads_or_mappings(
    rank: int, tmp_path: Path, is_default: bool, executor: str
) -> None:
    """Cycles of a default group, or of a new one: init, one call, destroy."""
    found, group = [], None
    for i in range(8):
        if is_default:
            dist.destroy_process_group()
            store = dist.FileStore(f"{tmp_path}/{executor}{i}", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            del store
        else:
            group = new_group()
        call(rank, executor, group)
        dist.barrier()
        if not is_default:
            dist.destroy_process_group(group)
            group = None
        found.append(held())
    assert_no_growth(found)


@on_ranks(2)
def test_mappings_of_outgrown_memory_are_released(rank: int) -> None:
    """Each call needs more memory than the one before."""
    found = []
    for rows in range(512, 512 * 8, 512):
        src, dst = rv.Layout((rows, 2), "R(1)V(1)D(2,1)"), rv.Layout((rows, 2), "R(1)V(1)D(1,2)")
        rv.redistribute(shard_of(rank, src), src, dst, executor="peer")
        found.append(held()["mappings"])
    assert max(found[1:]) == found[1]


@on_ranks(2)
def test_a_call_holds_the_memory_that_is_outgrown_while_it_runs(rank: int) -> None:
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
        assert_moved(made(shard_of(rank, pair(2)[0])), *pair(2))


@on_ranks(2)
def test_calls_under_way_raise_comm_error_when_their_group_is_destroyed(rank: int) -> None:
    """Rank 0 destroys the group while its calls wait for rank 1, which makes none of them."""
    group = new_group()
    call(rank, "peer", group)
    if rank == 0:
        pending = [call(rank, "peer", group, async_op=True) for _ in range(3)]
        time.sleep(0.2)
        # A default group is closed when it is destroyed, because no call holds it.
        World.of(group).close()
        for each in pending:
            with pytest.raises(rv.CommError, match=r"^process group .*was destroyed"):
                each.wait()
    dist.barrier()
    dist.destroy_process_group(group)


# --- a store that cannot be reached -------------------------------------------------------------

TIMEOUT_SECS = 3.0


def be_cut_off(rank: int) -> Waited:
    """Rank 0, which serves the store, stops answering while the others agree."""
    group = new_group(TIMEOUT_SECS)
    dist.barrier()
    if rank == 0:
        wake = f"sleep {2.5 * TIMEOUT_SECS}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    return timed(lambda: call(rank, "dist", group))


def test_ranks_that_cannot_reach_the_store_raise_in_time(worlds: Worlds) -> None:
    world = worlds(3)
    waited = world.run(be_cut_off)
    world.stop()
    assert all(each.error.startswith("CommError: ") for each in waited)
    assert all(each.secs < TIMEOUT_SECS + 5.0 for each in waited)
    for each in waited[1:]:
        assert "ranks that serve the store, or others, did not join within 3 s" in each.error


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
