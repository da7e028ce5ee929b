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
from tests.dist.shards import error_of, shard_of
from tests.dist.test_dist_errors import Call, Waited, assert_refused, timed

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
@on_ranks(NUM_RANKS)
def test_disagreement_about_an_argument_is_an_error_on_every_rank(
    rank: int, argument: str, executor: str
) -> None:
    bad, start = DISAGREEMENTS[argument]
    options = {"executor": executor}
    call = replace(bad, options=options | bad.options) if rank == VICTIM else Call(options=options)
    assert_refused(rank, call, start)


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(NUM_RANKS)
def test_each_rank_may_choose_async_op(rank: int, executor: str) -> None:
    options = {"executor": executor, "async_op": rank == VICTIM}
    made = rv.redistribute(shard_of(rank, SRC), SRC, DST, **options)
    assert_moved(made.wait() if rank == VICTIM else made, SRC, DST)


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(NUM_RANKS)
def test_a_rank_that_calls_in_another_group_is_named(rank: int, executor: str) -> None:
    groups = [new_group() for _ in range(2)]
    missing = [0, 1, 3] if rank == VICTIM else [VICTIM]
    assert_told(
        timed(lambda: good_call(rank, groups[rank == VICTIM], executor)),
        f"ranks {missing} did not join within 3 s",
    )
    assert_recovered(rank, executor)


# --- on the ranks -------------------------------------------------------------------------------


def new_group() -> Any:
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_SECS))
    # No rank ends while others still connect.
    dist.barrier()
    return group


def good_call(rank: int, group: Any, executor: str) -> Any:
    """A call of a transition that no rank of a new group knows."""
    return rv.redistribute(shard_of(rank, SRC), SRC, DST, group=group, executor=executor)


def assert_recovered(rank: int, executor: str) -> None:
    """The same call succeeds in a new group."""
    dist.barrier()
    assert_moved(good_call(rank, new_group(), executor), SRC, DST)


def assert_told(waited: Waited, words: str = "") -> None:
    assert waited.error.startswith("CommError: "), waited
    assert words in waited.error
    assert waited.secs < LIMIT_SECS


class InjectedError(Exception):
    """What a rank raises in the middle of a call."""


def made(executor: str, rank: int, group: Any) -> Callable[[], Any]:
    """A transition that all ranks have compiled and called once."""
    call, shard = rv.Redistributor(rv.plan(SRC, DST), group, executor=executor), shard_of(rank, SRC)
    call(shard)
    # Without a barrier, a rank that fails now could fail the first call of a slower rank.
    dist.barrier()
    return lambda: call(shard)


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
@on_ranks(NUM_RANKS)
def test_rank_that_raises_in_the_middle_of_a_call_is_an_error_on_the_others(
    rank: int, executor: str, after: int
) -> None:
    """One rank raises in a call, after the first ``after`` parts of its program."""
    call = made(executor, rank, new_group())
    if rank == VICTIM:
        assert error_of(break_after(call, after)) == "InjectedError: in the middle"
    else:
        named = f"rank {VICTIM} gave up; its own error says why" if executor == "peer" else "gloo"
        assert_told(timed(lambda: [call() for _ in range(3)]), named)
    assert_recovered(rank, executor)


# --- late ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("secs", [0.4, TIMEOUT_SECS + 1.5], ids=["in time", "too late"])
@on_ranks(NUM_RANKS)
def test_a_rank_that_stops_is_waited_for_until_the_timeout(
    rank: int, executor: str, secs: float
) -> None:
    """One rank is stopped by a signal for ``secs``, and then calls like all others."""
    call = made(executor, rank, new_group())
    if rank == VICTIM:
        subprocess.Popen(["sh", "-c", f"sleep {secs}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    waited = timed(call)
    if secs < TIMEOUT_SECS:
        assert waited.error == "none"
    else:
        is_named = executor == "peer" and rank != VICTIM
        assert_told(waited, f"rank {VICTIM} did not arrive within 3 s" if is_named else "")
    assert_recovered(rank, executor)


# --- dead ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_secs", [0.0, 0.02])
@on_ranks(NUM_RANKS, dying=[VICTIM])
def test_a_rank_killed_while_messages_are_under_way_is_an_error_on_the_others(
    rank: int, delay_secs: float
) -> None:
    """All call again and again by messages; one rank is killed at some time."""
    call = made("dist", rank, new_group())
    if rank == VICTIM:
        subprocess.Popen(["sh", "-c", f"sleep {delay_secs}; kill -KILL {os.getpid()}"])

    def loop() -> None:
        while True:
            call()

    assert error_of(loop).startswith("CommError: ")


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


@pytest.mark.parametrize("kind", ["pickle", "deep", "request"])
@on_ranks(NUM_RANKS)
def test_junk_in_the_store_is_an_error_and_is_never_executed(
    rank: int, kind: str, tmp_path: Path
) -> None:
    """Rank 2 posts junk under its key in the store."""
    mark, group = tmp_path / "ran", new_group()
    # What pickle would run: os.system("touch ...").
    pickled = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    junk = {"pickle": pickled, "deep": b"[" * 10**5, "request": b'{"src": 7}'}[kind]
    if rank == VICTIM:
        world = World.of(group)
        generation = generation_of(world, tuple(range(NUM_RANKS)), "junk")
        world.store.set(f"{generation}/0/{VICTIM}", junk)
    else:
        is_read = kind == "request"
        words = f"ranks 0 and {VICTIM} are in different calls" if is_read else "cannot be read"
        assert_told(timed(lambda: good_call(rank, group, "auto")), words)
    assert_recovered(rank, "auto")
    assert not mark.exists()
