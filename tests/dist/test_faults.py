"""Ranks that disagree, fail in the middle, stop for a while or die, with messages and with peers.

Whatever happens, every rank gets a named error in time, and the same call succeeds afterwards in a
new group, or in a new world where a process is gone. ``test_dist_errors`` and ``test_peer_faults``
test single executors; the tests here run with both.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm import native
from rvdcomm.api.options import TAKEN
from rvdcomm.run.agree import generation_of
from rvdcomm.run.world import World
from tests.covering import each_value
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import faults_of, shard_of
from tests.dist.test_dist_errors import Call, Waited, faults_of_misuse, longest_secs, misuse, timed
from tests.dist.world import Worlds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

EXECUTORS = ("dist", "peer")
NUM_RANKS = 4
VICTIM = 2
# Of the groups in which a rank fails; the world's own is longer, so that all meet afterwards.
TIMEOUT_SECS = 3.0
# A rank waits for the others, for links, and then for the agreement of all.
LIMIT_SECS = 2.5 * TIMEOUT_SECS + 3.0
SRC, DST = rv.Layout((90, 10), "R(1)V(2)D(2,1)"), rv.Layout((90, 10), "R(1)V(1)D(1,4)")

# --- every argument -----------------------------------------------------------------------------

TOPOLOGY = rv.Topology.single_host(NUM_RANKS, 1e-6, 1e9)
PASSED = "redistribute R(1)V(1)D(4) -> R(4)V(1)D(1): rank 2 passed"
DISAGREEMENTS: dict[str, tuple[Call, str]] = {
    "tensor": (Call(shard=None), f"ShapeMismatchError: {PASSED} None, its shard is [2]."),
    "src": (
        Call(src=rv.Layout((8,), "R(1)V(1)D(4)", [0, 1, 3, 2])),
        "LayoutError: redistribute: ranks disagree about src: rank 0 asks for",
    ),
    "dst": (
        Call(dst=rv.Layout((8,), "R(1)V(4)D(1)")),
        "LayoutError: redistribute: ranks disagree about dst: rank 0 asks for",
    ),
    "shape": (
        Call(options={"shape": (8,)}),
        "LayoutError: redistribute: ranks disagree about shape: rank 0 asks for None, rank 2 for",
    ),
    "topology": (
        Call(options={"topology": TOPOLOGY}),
        "LayoutError: redistribute: ranks disagree about topology: rank 0 asks for None, rank 2",
    ),
    "out": (Call(out=(7,)), f"ShapeMismatchError: {PASSED} [7], its out is [8]."),
    "dtype": (Call(dtype="float64"), "ShapeMismatchError: redistribute R(1)V(1)D(4) shape(8)"),
    "executor": (
        Call(options={"executor": "auto"}),
        "LayoutError: redistribute: ranks disagree about executor: rank 0 asks for",
    ),
    "memory_limit": (
        Call(options={"memory_limit": 1 << 20}),
        "LayoutError: redistribute: ranks disagree about memory_limit: rank 0 asks for None",
    ),
    "requires_grad": (
        Call(requires_grad=True),
        "LayoutError: redistribute: ranks disagree about requires_grad: rank 0 asks for False",
    ),
    "replica_grads": (
        Call(options={"replica_grads": "copies"}),
        "LayoutError: redistribute: ranks disagree about replica_grads: rank 0 asks for parts",
    ),
}
"""What rank 2 passes for one argument, and how the error begins that comes on every rank."""

NOT_COMPARED = {"async_op", "group"}
"""Arguments with their own tests: every rank may choose ``async_op``; ``group`` compares."""


def test_disagreement_cases_cover_every_argument_of_redistribute() -> None:
    named = {*inspect.signature(rv.redistribute).parameters} - {"options", "by_name"}
    assert named | TAKEN["redistribute"] == {*DISAGREEMENTS, *NOT_COMPARED}


@each_value(argument=DISAGREEMENTS, executor=EXECUTORS)
def test_disagreement_about_an_argument_is_an_error_on_every_rank(
    worlds: Worlds, argument: str, executor: str
) -> None:
    bad, start = DISAGREEMENTS[argument]
    good = Call(options={"executor": executor})
    calls = [good] * NUM_RANKS
    calls[VICTIM] = replace(bad, options={"executor": executor} | bad.options)
    seen = worlds(NUM_RANKS).run(misuse, calls)
    errors = {each.error for each in seen}
    assert len(errors) == 1
    assert errors.pop().startswith(start)
    assert faults_of_misuse(seen, [each.error for each in seen]) == []


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(NUM_RANKS)
def test_each_rank_may_choose_async_op(rank: int, executor: str) -> None:
    options = {"executor": executor, "async_op": rank == VICTIM}
    made = rv.redistribute(shard_of(rank, SRC), SRC, DST, **options)
    assert_moved(made.wait() if rank == VICTIM else made, SRC, DST)


def call_in_two_groups(rank: int, executor: str) -> tuple[Waited, Any]:
    groups = [new_group() for _ in range(2)]
    waited = timed(lambda: good_call(rank, groups[rank == VICTIM], executor))
    dist.barrier()
    return waited, good_call(rank, new_group(), executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_rank_that_calls_in_another_group_is_named(worlds: Worlds, executor: str) -> None:
    found = worlds(NUM_RANKS).run(call_in_two_groups, executor)
    waited, results = zip(*found, strict=True)
    for rank in range(NUM_RANKS):
        missing = [0, 1, 3] if rank == VICTIM else [VICTIM]
        assert waited[rank].error.startswith("CommError: ")
        assert f"ranks {missing} did not join within 3 s" in waited[rank].error
    assert longest_secs(waited) < LIMIT_SECS
    assert faults_of(results, SRC, DST) == []


# --- on the ranks -------------------------------------------------------------------------------


def new_group() -> Any:
    return dist.new_group(
        list(range(dist.get_world_size())), timeout=timedelta(seconds=TIMEOUT_SECS)
    )


def good_call(rank: int, group: Any, executor: str) -> Any:
    """A call of a transition that no rank of a new group knows."""
    shard = shard_of(rank, SRC)
    return rv.redistribute(shard, SRC, DST, group=group, executor=executor).numpy()


class InjectedError(Exception):
    """What a rank raises in the middle of a call."""


def made(executor: str, rank: int, group: Any) -> Callable[[], Any]:
    """A transition that all ranks have compiled and called once."""
    call, shard = rv.Redistributor(rv.plan(SRC, DST), group, executor=executor), shard_of(rank, SRC)
    call(shard)
    # Without a barrier, a rank that fails now could fail the first call of a slower rank.
    dist.barrier()
    return lambda: call(shard)


def raise_in_the_middle(rank: int, executor: str, after: int) -> tuple[Waited, Any]:
    """One rank raises in a call, after the first ``after`` parts of its program."""
    call = made(executor, rank, new_group())
    if rank == VICTIM:
        broken = break_after(call, after)
        waited = timed(broken)
    else:
        waited = timed(lambda: [call() for _ in range(3)])
    dist.barrier()
    return waited, good_call(rank, new_group(), executor)


def break_after(call: Callable[[], Any], after: int) -> Callable[[], Any]:
    """The call, with a failure between two steps of the program."""
    program = inspect.getclosurevars(call).nonlocals["call"]._program
    native_steps = next(iter(program._native.values()))

    def fail(*_: Any) -> None:
        raise InjectedError("in the middle")

    native_steps.alone = None
    if len(native_steps.steps) == 0:
        native_steps.steps = [(stage.run, None) for stage in native_steps.stages]
    native_steps.steps.insert(after, (fail, None))
    return call


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_rank_that_raises_in_the_middle_of_a_call_is_an_error_on_the_others(
    worlds: Worlds, executor: str, after: int
) -> None:
    world = worlds(NUM_RANKS)
    waited, results = zip(*world.run(raise_in_the_middle, executor, after), strict=True)
    world.stop()
    assert waited[VICTIM].error == "InjectedError: in the middle"
    for rank in (0, 1, 3):
        assert waited[rank].error.startswith("CommError: ")
        named = f"rank {VICTIM} gave up; its own error says why" if executor == "peer" else "gloo"
        assert named in waited[rank].error
    assert longest_secs(waited) < LIMIT_SECS
    assert faults_of(results, SRC, DST) == []


# --- late ---------------------------------------------------------------------------------------


def stop_for(rank: int, executor: str, secs: float) -> tuple[Waited, Any]:
    """One rank is stopped by a signal for ``secs``, and then calls like all others."""
    call = made(executor, rank, new_group())
    if rank == VICTIM:
        subprocess.Popen(["sh", "-c", f"sleep {secs}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    waited = timed(call)
    dist.barrier()
    return waited, good_call(rank, new_group(), executor)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("secs", [0.4, TIMEOUT_SECS + 1.5], ids=["in time", "too late"])
def test_a_rank_that_stops_is_waited_for_until_the_timeout(
    worlds: Worlds, executor: str, secs: float
) -> None:
    world = worlds(NUM_RANKS)
    waited, results = zip(*world.run(stop_for, executor, secs), strict=True)
    assert faults_of(results, SRC, DST) == []
    if secs < TIMEOUT_SECS:
        assert [each.error for each in waited] == ["none"] * NUM_RANKS
        return
    world.stop()
    assert [each.error.partition(":")[0] for each in waited] == ["CommError"] * NUM_RANKS
    assert longest_secs(waited) < LIMIT_SECS
    named = f"rank {VICTIM} did not arrive within 3 s"
    assert executor == "dist" or all(named in waited[rank].error for rank in (0, 1, 3))


# --- dead ---------------------------------------------------------------------------------------


def die_while_sending(rank: int, delay_secs: float) -> Waited:
    """All call again and again by messages; one rank is killed at some time."""
    call = made("dist", rank, new_group())
    if rank == VICTIM:
        subprocess.Popen(["sh", "-c", f"sleep {delay_secs}; kill -KILL {os.getpid()}"])

    def loop() -> None:
        while True:
            call()

    return timed(loop)


@pytest.mark.parametrize("delay_secs", [0.0, 0.02])
def test_a_rank_killed_while_messages_are_under_way_is_an_error_on_the_others(
    worlds: Worlds, delay_secs: float
) -> None:
    world = worlds(NUM_RANKS)
    waited = world.run(die_while_sending, delay_secs, dying=[VICTIM])
    survivors = [each for rank, each in enumerate(waited) if rank != VICTIM]
    assert [each.error.partition(":")[0] for each in survivors] == ["CommError"] * 3
    # And a new world works.
    assert faults_of(world.run(good_call, None, "dist"), SRC, DST) == []


# --- what is in the store -----------------------------------------------------------------------


@on_ranks(NUM_RANKS)
def test_calls_with_inferred_shape_leave_no_keys_in_the_store(rank: int) -> None:
    """Every call whose shape is inferred compares."""
    group, shard = new_group(), shard_of(rank, rv.Layout((8,), "R(1)V(1)D(4)"))
    counts = []
    for _ in range(3):
        for _ in range(10):
            rv.redistribute(shard, "R(1)V(1)D(4)", "R(4)V(1)D(1)", group=group)
        dist.barrier()
        counts.append(World.of(group).store.num_keys())
        dist.barrier()
    assert counts == counts[:1] * 3


def post_junk(rank: int, junk: bytes, executor: str) -> tuple[Waited, Any]:
    """Rank 2 posts junk under its key in the store."""
    group = new_group()
    if rank == VICTIM:
        world = World.of(group)
        generation = generation_of(world, tuple(range(NUM_RANKS)), "junk")
        world.store.set(f"{generation}/0/{VICTIM}", junk)
        waited = Waited("posted", 0.0)
    else:
        waited = timed(lambda: good_call(rank, group, executor))
    dist.barrier()
    return waited, good_call(rank, new_group(), executor)


@pytest.mark.parametrize("kind", ["pickle", "deep", "request"])
def test_junk_in_the_store_is_an_error_and_is_never_executed(
    worlds: Worlds, kind: str, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    # What pickle would run: os.system("touch ...").
    pickled = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    junk = {"pickle": pickled, "deep": b"[" * 10**5, "request": b'{"src": 7}'}[kind]
    found = worlds(NUM_RANKS).run(post_junk, junk, "auto")
    waited, results = zip(*found, strict=True)
    words = f"what rank {VICTIM} posted cannot be read"
    if kind == "request":
        words = f"ranks 0 and {VICTIM} are in different calls"
    for rank in (0, 1, 3):
        assert waited[rank].error.startswith("CommError: ")
        assert words in waited[rank].error
    assert not mark.exists()
    assert faults_of(results, SRC, DST) == []
