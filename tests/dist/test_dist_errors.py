"""Bad input is an error of the right class on every rank, before any byte is sent, and in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm.run.communicator import Subgroup
from rvdcomm.run.request import SHARES_MEMORY
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import ProcessWorld, Worlds

pytestmark = pytest.mark.dist

GOOD = (rv.Layout((8,), "R(1)V(1)D(4)"), rv.Layout((8,), "R(4)V(1)D(1)"))
SRC, DST = map(str, GOOD)
SHORT = "redistribute R(1)V(1)D(4) -> R(4)V(1)D(1)"
WHOLE = f"redistribute {SRC} -> {DST}"


# --- on the ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What one rank passes: layouts, shapes of its tensors, and other arguments."""

    src: rv.Layout | str = GOOD[0]
    dst: rv.Layout | str = GOOD[1]
    shard: tuple[int, ...] | None = (2,)
    dtype: str = "float32"
    out: tuple[int, ...] | None = None
    out_dtype: str = "float32"
    is_out_shared: bool = False
    requires_grad: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, group: Any = None) -> Any:
        tensor = self._zeros(self.shard, self.dtype)
        out = self._zeros(self.out, self.out_dtype)
        if self.is_out_shared:
            room = torch.zeros(9)
            tensor, out = room[:2], room[1:]
        if tensor is not None and self.requires_grad:
            tensor.requires_grad_()
        return rv.redistribute(tensor, self.src, self.dst, out=out, group=group, **self.options)

    @staticmethod
    def _zeros(shape: tuple[int, ...] | None, dtype: str) -> Tensor | None:
        return None if shape is None else torch.zeros(shape, dtype=getattr(torch, dtype))


@dataclass(frozen=True)
class Seen:
    """What a rank saw of a bad call and of the good one after it."""

    error: str
    num_backend_calls: int
    good_result: Any


@contextmanager
def counted_backend_calls() -> Iterator[list[str]]:
    """Collect the names of the backend's calls."""
    names = ("all_to_all", "all_gather", "all_reduce")
    saved = {name: getattr(Subgroup, name) for name in names}
    calls: list[str] = []

    def counting(name: str) -> Callable[..., None]:
        def call(self: Subgroup, *args: Any) -> None:
            calls.append(name)
            saved[name](self, *args)

        return call

    for name in names:
        setattr(Subgroup, name, counting(name))
    try:
        yield calls
    finally:
        for name in names:
            setattr(Subgroup, name, saved[name])


def misuse(rank: int, calls: Sequence[Call | None], timeout_secs: float = 10.0) -> Seen:
    """Make a bad call in a new group, where nothing is agreed yet, and a good one after it."""
    timeout = timedelta(seconds=timeout_secs)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timeout)
    with counted_backend_calls() as names:
        call = calls[rank]
        error = "none" if call is None else error_of(lambda: call(group))
    src, dst = GOOD
    result = rv.redistribute(shard_of(rank, src), src, dst, group=group)
    return Seen(error, len(names), result.numpy())


def faults_of_misuse(seen: Sequence[Seen], errors: Sequence[str]) -> list[str]:
    """Wrong errors, calls of the backend before an error, and faults of the good call after it."""
    faults = []
    for rank, (got, want) in enumerate(zip(seen, errors, strict=True)):
        if got.error != want:
            faults.append(f"rank {rank} raised {got.error!r}, not {want!r}")
        if got.num_backend_calls:
            faults.append(f"rank {rank} sent before its error")
    return faults + faults_of([got.good_result for got in seen], *GOOD)


# --- the same bad input on every rank -----------------------------------------------------------

ALL_SAME = {
    "rank outside": (
        Call(src="R(1)V(1)D(4) shape(8) ranks(0,1,2,4)"),
        "LayoutError",
        "ranks [4] are outside the group, which has ranks 0 to 3.",
    ),
    "unparsable src": (
        Call(src="R1V1D(4)", dst="R(4)V(1)D(1)"),
        "LayoutError",
        "cannot parse layout 'R1V1D(4)': expected 'R(' at column 1.",
    ),
    "V on bool": (
        Call(
            src=rv.Layout((2,), "R(1)V(4)D(1)"), dst=rv.Layout((2,), "R(4)V(1)D(1)"), dtype="bool"
        ),
        "LayoutError",
        "R(1)V(4)D(1) has V(4), but bool values cannot be summed; use V(1) or another dtype.",
    ),
    "rank outside the topology": (
        Call(options={"topology": rv.Topology.single_host(3, 0.0, 1e9)}),
        "LayoutError",
        "ranks [3] are not in the topology, which has [0, 1, 2].",
    ),
    "no shard": (
        Call(shard=None),
        "ShapeMismatchError",
        "no rank passed a shard, so the dtype is unknown.",
    ),
    "out shares memory": (Call(is_out_shared=True), "LayoutError", f"rank 0: {SHARES_MEMORY}"),
}
"""The call of every rank; the class of the error of every rank, and what it says of the call.

One of each kind of check; ``tests/run/test_request.py`` has all of them, without processes."""


@pytest.mark.parametrize("what", ALL_SAME)
def test_bad_input_is_an_error_on_every_rank(worlds: Worlds, what: str) -> None:
    call, name, fact = ALL_SAME[what]
    seen = worlds(4).run(misuse, [call] * 4)
    error = f"{name}: redistribute {call.src} -> {call.dst}: {fact}"
    assert faults_of_misuse(seen, [error] * 4) == []


def test_rank_outside_the_group_is_an_error_on_the_others(worlds: Worlds) -> None:
    layout = rv.Layout((8,), "R(1)V(1)D(4)", [5, 0, 1, 2])
    seen = worlds(4).run(misuse, [Call(src=layout, dst=layout)] * 3 + [None])
    what = f"redistribute {layout} -> {layout}"
    error = f"LayoutError: {what}: ranks [5] are outside the group, which has ranks 0 to 3."
    assert faults_of_misuse(seen, [error] * 3 + ["none"]) == []


def test_call_of_a_rank_in_neither_layout_is_an_error_on_that_rank_only(worlds: Worlds) -> None:
    src, dst = (
        rv.Layout((6,), "R(1)V(1)D(3)", [0, 1, 3]),
        rv.Layout((6,), "R(3)V(1)D(1)", [0, 1, 3]),
    )
    calls = [Call(src, dst) if rank != 2 else Call(src, dst, shard=None) for rank in range(4)]
    errors = [seen.error for seen in worlds(4).run(misuse, calls)]
    what = "redistribute R(1)V(1)D(3) shape(6) ranks(0,1,3) -> R(3)V(1)D(1) shape(6) ranks(0,1,3)"
    error = f"{what}: rank 2 called it but is in neither layout, which have ranks 0,1,3."
    assert errors == ["none", "none", f"LayoutError: {error}", "none"]


# --- bad input on one rank ----------------------------------------------------------------------

TOPOLOGY = rv.Topology.single_host(4, 1e-6, 1e9)
DISAGREE = "LayoutError: redistribute: ranks disagree about"
DTYPES = f"ShapeMismatchError: {WHOLE}: ranks disagree about dtype: rank 3 has float32, rank 2 has"
ONE_RANK_BAD = {
    "shard of the wrong shape": (
        Call(shard=(3,)),
        f"ShapeMismatchError: {SHORT}: rank 2 passed [3], its shard is [2].",
    ),
    "out of the wrong dtype": (Call(out=(8,), out_dtype="int32"), f"{DTYPES} int32."),
    "dtype that contradicts the shards": (Call(options={"dtype": torch.int8}), f"{DTYPES} int8."),
    "unparsable dst": (
        Call(dst="R4V1D1"),
        f"{DISAGREE} dst: rank 0 asks for {DST}, rank 2 for R4V1D1.",
    ),
    "other shape in the layouts": (
        Call(rv.Layout((7,), "R(1)V(1)D(4)"), rv.Layout((7,), "R(4)V(1)D(1)")),
        f"{DISAGREE} src: rank 0 asks for {SRC}, rank 2 for R(1)V(1)D(4) shape(7) ranks(0:4).",
    ),
    "other topology": (
        Call(options={"topology": TOPOLOGY}),
        f"{DISAGREE} topology: rank 0 asks for None, rank 2 for {TOPOLOGY!r}.",
    ),
    "out shares memory": (
        Call(is_out_shared=True),
        f"LayoutError: {WHOLE}: rank 2: {SHARES_MEMORY}",
    ),
}
"""The call of rank 2, all others making the default call, and the error of every rank.

``test_faults`` has a disagreement about every argument."""


@pytest.mark.parametrize("what", ONE_RANK_BAD)
def test_bad_input_on_one_rank_is_an_error_on_every_rank(worlds: Worlds, what: str) -> None:
    call, error = ONE_RANK_BAD[what]
    seen = worlds(4).run(misuse, [Call(), Call(), call, Call()])
    assert faults_of_misuse(seen, [error] * 4) == []


# --- ranks that do not come ---------------------------------------------------------------------

TIMEOUT_SECS = 3.0
# The time that a rank needs besides waiting, on a machine that has other work, too.
SLACK_SECS = 3.0


@dataclass(frozen=True)
class Waited:
    """What a rank got from a call, and how long that took."""

    error: str
    secs: float
    result: Any = None


def timed(call: Callable[[], Any]) -> Waited:
    start = time.monotonic()
    results: list[Any] = []
    error = error_of(lambda: results.append(call()))
    result = None if not results or results[0] is None else results[0].numpy()
    return Waited(error, time.monotonic() - start, result)


def hurried(worlds: Worlds) -> ProcessWorld:
    """A world with a short timeout."""
    return worlds(4, timeout_secs=TIMEOUT_SECS)


def classes_of(waited: Sequence[Waited | None]) -> list[str | None]:
    return [None if w is None else w.error.partition(":")[0] for w in waited]


def longest_secs(waited: Sequence[Waited | None]) -> float:
    return max(w.secs for w in waited if w is not None)


def redistribute_good(rank: int, seed: int = 0, **options: Any) -> Any:
    src, dst = GOOD
    return rv.redistribute(shard_of(rank, src, seed), src, dst, **options)


def without(
    rank: int, absent: int, is_agreed: bool, is_late: bool = False, is_pending: bool = False
) -> Waited | None:
    """All but one rank call, which does not, or when the others have given up."""
    if is_agreed:
        redistribute_good(rank)
    if rank == absent:
        if not is_late:
            return None
        time.sleep(TIMEOUT_SECS + 1.0)
    if is_pending:
        return timed(redistribute_good(rank, async_op=True).wait)
    return timed(lambda: redistribute_good(rank))


@pytest.mark.parametrize(
    "absent, is_agreed, is_late, is_pending",
    [(0, False, False, False), (2, True, False, False), (1, False, True, False),
     (3, True, False, True)],
    ids=["never", "not again", "too late", "pending"],
)  # fmt: skip
def test_rank_that_misses_a_call_is_an_error_on_the_others(
    worlds: Worlds, absent: int, is_agreed: bool, is_late: bool, is_pending: bool
) -> None:
    world = hurried(worlds)
    waited = world.run(without, absent, is_agreed, is_late, is_pending)
    world.stop()
    is_told = [is_late or rank != absent for rank in range(4)]
    assert classes_of(waited) == ["CommError" if told else None for told in is_told]
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS
    if not is_agreed and not is_late:
        error = (
            f"CommError: {WHOLE}: ranks [{absent}] did not join within 3 s. They may be in another "
            "call, or think that this transition has other ranks."
        )
        assert {each.error for each in waited if each is not None} == {error}


def meeting_group() -> Any:
    """A group in which ranks meet that give up at different times."""
    return dist.new_group(list(range(4)), timeout=timedelta(seconds=10 * TIMEOUT_SECS))


def call_again(rank: int, meeting: Any) -> tuple[Waited, Waited]:
    """The same call in the group that failed, and in a new one."""
    dist.barrier(meeting)
    again = timed(lambda: redistribute_good(rank, seed=1))
    dist.barrier(meeting)
    group = dist.new_group(list(range(4)))
    return again, timed(lambda: redistribute_good(rank, seed=1, group=group))


def faults_of_calls_again(again: Sequence[Waited], anew: Sequence[Waited]) -> list[str]:
    """What is wrong after a failure: the group is failed on every rank, a new one works."""
    faults = [
        f"rank {rank}: {waited.error}"
        for rank, waited in enumerate(again)
        if not waited.error.startswith("CommError: ")
    ]
    faults += [waited.error for waited in anew if waited.error != "none"]
    return faults or faults_of([waited.result for waited in anew], *GOOD, seed=1)


def stay_away_once(rank: int, absent: int) -> tuple[Waited | None, Waited, Waited]:
    meeting = meeting_group()
    if rank == absent:
        time.sleep(TIMEOUT_SECS)
        first = None
    else:
        first = timed(lambda: redistribute_good(rank))
    return first, *call_again(rank, meeting)


def test_group_is_failed_on_every_rank_after_one_rank_missed_a_call(worlds: Worlds) -> None:
    world = hurried(worlds)
    first, again, anew = zip(*world.run(stay_away_once, 2), strict=True)
    world.stop()
    assert classes_of(first) == ["CommError", "CommError", None, "CommError"]
    assert faults_of_calls_again(again, anew) == []
    for rank in (0, 1, 3):
        assert "failed in an earlier call: CommError: redistribute" in again[rank].error
        assert "ranks [2] did not join within 3 s" in again[rank].error
        assert again[rank].error.endswith("init_process_group, or new_group.")
        assert again[rank].secs < SLACK_SECS, "nobody waits for a group that failed"


def disagree_about_members(rank: int) -> tuple[Waited, Waited, Waited]:
    """Rank 1 calls a transition of ranks 0 and 1; the others call one of all ranks."""
    pair = rv.Layout((8,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((8,), "R(2)V(1)D(1)", [0, 1])
    src, dst = pair if rank == 1 else GOOD
    meeting = meeting_group()
    first = timed(lambda: rv.redistribute(shard_of(rank, src), src, dst))
    return first, *call_again(rank, meeting)


def test_disagreement_about_the_members_is_an_error_in_time_on_every_rank(worlds: Worlds) -> None:
    world = hurried(worlds)
    first, again, anew = zip(*world.run(disagree_about_members), strict=True)
    world.stop()
    assert classes_of(first) == ["CommError"] * 4
    assert ["ranks [1] did not join" in w.error for w in first] == [True, False, True, True]
    assert "ranks [0] did not join" in first[1].error
    assert longest_secs(first) < TIMEOUT_SECS + SLACK_SECS
    assert faults_of_calls_again(again, anew) == []


# --- ranks that die -----------------------------------------------------------------------------


def die(rank: int, dying: int, is_agreed: bool) -> Waited:
    """One rank ends while the others call."""
    if is_agreed:
        redistribute_good(rank)
    if rank == dying:
        os._exit(1)
    return timed(lambda: redistribute_good(rank))


# Rank 0 serves the store.
@pytest.mark.parametrize("dying, is_agreed", [(0, True), (2, False)])
def test_death_of_a_rank_is_an_error_on_the_others(
    worlds: Worlds, dying: int, is_agreed: bool
) -> None:
    waited = hurried(worlds).run(die, dying, is_agreed, dying=[dying])
    wanted = [None if rank == dying else "CommError" for rank in range(4)]
    assert classes_of(waited) == wanted
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS


# --- bad input in a later call ------------------------------------------------------------------


def misuse_later(rank: int, calls: Sequence[Call]) -> Waited:
    """A bad call of a transition that all ranks have agreed on."""
    redistribute_good(rank)
    return timed(calls[rank])


FEWER = [rv.Layout((8,), text, [1, 2]) for text in ("R(1)V(1)D(2)", "R(2)V(1)D(1)")]
LATER = {
    "shard of the wrong shape": Call(shard=(3,)),
    "other dst": Call(dst=rv.Layout((8,), "R(1)V(4)D(1)")),
    "fewer ranks": Call(*FEWER, shard=(4,)),
}


@pytest.mark.parametrize("what", LATER)
def test_bad_later_call_of_one_rank_is_an_error_in_time_on_every_rank(
    worlds: Worlds, what: str
) -> None:
    world = hurried(worlds)
    waited = world.run(misuse_later, [Call(), Call(), LATER[what], Call()])
    world.stop()
    assert waited[2].error.partition(":")[0] in ("LayoutError", "ShapeMismatchError", "CommError")
    assert [w.error.partition(":")[0] for w in waited if w is not waited[2]] == ["CommError"] * 3
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS


@pytest.mark.parametrize(
    "call, name",
    [
        (Call(shard=(3,)), "ShapeMismatchError"),
        (Call(shard=None), "ShapeMismatchError"),
        (Call(out=(3,)), "ShapeMismatchError"),
        (Call(is_out_shared=True), "LayoutError"),
    ],
    ids=["shape", "no shard", "out", "out shares memory"],
)
@on_ranks(4)
def test_next_call_succeeds_after_a_bad_later_call_of_all_ranks(
    rank: int, call: Call, name: str
) -> None:
    redistribute_good(rank)
    assert error_of(call).startswith(f"{name}: ")
    assert_moved(redistribute_good(rank, seed=1), *GOOD, seed=1)


# --- Redistributor ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dtype, words",
    [((3,), "float32", "passed [3], its shard is [2]"), ((2,), "int8", "passed int8, the plan is")],
)
@on_ranks(4)
def test_redistributor_checks_its_tensor(
    rank: int, shape: tuple[int, ...], dtype: str, words: str
) -> None:
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
    error = error_of(lambda: rv.Redistributor(rv.plan(*GOOD))(tensor))
    assert error.startswith(f"ShapeMismatchError: {SHORT}: rank {rank} {words}")


@on_ranks(4)
def test_redistributor_refuses_ranks_outside_the_group(rank: int) -> None:
    layout = rv.Layout((8,), "R(1)V(1)D(2)", [0, 7])
    words = "ranks [7] are outside the group, which has ranks 0 to 3."
    error = f"LayoutError: redistribute R(1)V(1)D(2) -> R(1)V(1)D(2): {words}"
    assert error_of(lambda: rv.Redistributor(rv.plan(layout, layout))) == error


def make_redistributor_alone(rank: int, absent: int, plan: rv.Plan) -> Waited | None:
    return None if rank == absent else timed(lambda: rv.Redistributor(plan) and None)


def test_rank_that_creates_no_redistributor_is_an_error_on_the_others(worlds: Worlds) -> None:
    world = hurried(worlds)
    waited = world.run(make_redistributor_alone, 1, rv.plan(*GOOD))
    world.stop()
    assert classes_of(waited) == ["CommError", None, "CommError", "CommError"]
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS


def test_redistribute_without_a_process_group_is_an_error() -> None:
    words = r"torch.distributed is not initialized; call init_process_group first"
    with pytest.raises(rv.CommError, match=words):
        rv.redistribute(torch.zeros(2), *GOOD)
