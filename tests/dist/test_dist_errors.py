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

CUTS_ERROR = "of dim 0 do not cut 8 elements in 4; give 5 points in ascending order from 0 to 8."

ALL_SAME = {
    "rank twice": (
        Call(src="R(1)V(1)D(4) shape(8) ranks(0,0,1,2)"),
        "LayoutError",
        "R(1)V(1)D(4) over ranks (0, 0, 1, 2): rank 0 is given twice.",
    ),
    "rank outside": (
        Call(src="R(1)V(1)D(4) shape(8) ranks(0,1,2,4)"),
        "LayoutError",
        "ranks [4] are outside the group, which has ranks 0 to 3.",
    ),
    "wrong counts": (
        Call(src="R(1)V(1)D(3)", dst="R(4)V(1)D(1)", options={"shape": (8,)}),
        "LayoutError",
        "R(1)V(1)D(3) needs 3 ranks (1*1*3) but 4 were given: (0, 1, 2, 3).",
    ),
    "wrong number of dims": (
        Call(src="R(1)V(1)D(4,1)", dst="R(4)V(1)D(1)", options={"shape": (8,)}),
        "LayoutError",
        "R(1)V(1)D(4,1) splits 2 dims but shape (8,) has 1; give D one count a dim.",
    ),
    "unparsable src": (
        Call(src="R1V1D(4)", dst="R(4)V(1)D(1)"),
        "LayoutError",
        "cannot parse layout 'R1V1D(4)': expected 'R(' at column 1.",
    ),
    "unparsable dst": (
        Call(src="R(1)V(1)D(4)", dst="R(4)V(1)D(x)"),
        "LayoutError",
        "cannot parse layout 'R(4)V(1)D(x)': expected ')' at column 11.",
    ),
    "unparsable whole text": (
        Call(src="R(1)V(1)D(4) shape(8) ranks(0-3)"),
        "LayoutError",
        "cannot parse layout 'R(1)V(1)D(4) shape(8) ranks(0-3)': expected the form "
        "'R(1)V(1)D(1,2) shape(4,6) ranks(0:2) cuts(0,4;0,2,6)'.",
    ),
    "count of zero": (
        Call(src="R(0)V(1)D(4)", dst="R(4)V(1)D(1)", options={"shape": (8,)}),
        "LayoutError",
        "RVD counts must be integers of at least 1, got r=0, v=1, d=(4,).",
    ),
    "cut points out of order": (
        Call(src="R(1)V(1)D(4) shape(8) cuts(0,4,2,6,8)"),
        "LayoutError",
        f"cut points [0, 4, 2, 6, 8] {CUTS_ERROR}",
    ),
    "cut points beyond the shape": (
        Call(src="R(1)V(1)D(4) shape(8) cuts(0,2,4,6,9)"),
        "LayoutError",
        f"cut points [0, 2, 4, 6, 9] {CUTS_ERROR}",
    ),
    "different shapes": (
        Call(dst=rv.Layout((9,), "R(4)V(1)D(1)")),
        "LayoutError",
        f"src {SRC} and dst R(4)V(1)D(1) shape(9) ranks(0:4) differ in shape: (8,) and (9,).",
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
    "shape cannot be inferred": (
        Call(src="R(1)V(1)D(4)", dst="R(4)V(1)D(1)", shard=(2, 3)),
        "ShapeMismatchError",
        "R(1)V(1)D(4): the global shape cannot be inferred from shards of shapes "
        "['[2, 3]', '[2, 3]', '[2, 3]', '[2, 3]']; pass shape=.",
    ),
    "out shares memory": (
        Call(is_out_shared=True),
        "LayoutError",
        f"rank 0: {SHARES_MEMORY}",
    ),
}
"""The call of every rank; the class of the error of every rank, and what it says of the call."""


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
    "shard of the wrong number of dims": (
        Call(shard=(2, 1)),
        f"ShapeMismatchError: {SHORT}: rank 2 passed [2, 1], its shard is [2].",
    ),
    "no shard": (
        Call(shard=None),
        f"ShapeMismatchError: {SHORT}: rank 2 passed None, its shard is [2].",
    ),
    "out of the wrong shape": (
        Call(out=(7,)),
        f"ShapeMismatchError: {SHORT}: rank 2 passed [7], its out is [8].",
    ),
    "out of the wrong dtype": (Call(out=(8,), out_dtype="int32"), f"{DTYPES} int32."),
    "shard of the wrong dtype": (Call(dtype="float64"), f"{DTYPES} float64."),
    "dtype that contradicts the shards": (
        Call(options={"dtype": torch.int8}),
        f"{DTYPES} int8.",
    ),
    "other src": (
        Call(src=rv.Layout((8,), "R(1)V(1)D(4)", [0, 1, 3, 2])),
        f"{DISAGREE} src: rank 0 asks for {SRC}, rank 2 for R(1)V(1)D(4) shape(8) ranks(0,1,3,2).",
    ),
    "other cuts": (
        Call(src=rv.Layout((8,), "R(1)V(1)D(4)", cuts=[[0, 1, 4, 6, 8]])),
        f"{DISAGREE} src: rank 0 asks for {SRC}, rank 2 for {SRC} cuts(0,1,4,6,8).",
    ),
    "other dst": (
        Call(dst=rv.Layout((8,), "R(1)V(4)D(1)")),
        f"{DISAGREE} dst: rank 0 asks for {DST}, rank 2 for R(1)V(4)D(1) shape(8) ranks(0:4).",
    ),
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
    "tensor that requires grad": (
        Call(requires_grad=True),
        f"{DISAGREE} requires_grad: rank 0 asks for False, rank 2 for True.",
    ),
    "out shares memory": (
        Call(is_out_shared=True),
        f"LayoutError: {WHOLE}: rank 2: {SHARES_MEMORY}",
    ),
}
"""The call of rank 2, all others making the default call, and the error of every rank."""


@pytest.mark.parametrize("what", ONE_RANK_BAD)
def test_bad_input_on_one_rank_is_an_error_on_every_rank(worlds: Worlds, what: str) -> None:
    call, error = ONE_RANK_BAD[what]
    seen = worlds(4).run(misuse, [Call(), Call(), call, Call()])
    assert faults_of_misuse(seen, [error] * 4) == []


def test_topology_of_one_rank_that_lacks_a_rank_is_an_error_on_every_rank(worlds: Worlds) -> None:
    small = rv.Topology.single_host(3, 0.0, 1e9)
    calls = [Call(options={"topology": TOPOLOGY})] * 3 + [Call(options={"topology": small})]
    error = f"{DISAGREE} topology: rank 0 asks for {TOPOLOGY!r}, rank 3 for {small!r}."
    assert faults_of_misuse(worlds(4).run(misuse, calls), [error] * 4) == []


def test_given_shapes_that_differ_are_an_error_on_every_rank(worlds: Worlds) -> None:
    texts = {"src": "R(1)V(1)D(4)", "dst": "R(4)V(1)D(1)"}
    calls = [Call(**texts, options={"shape": (8,) if rank < 3 else (7,)}) for rank in range(4)]
    error = f"{DISAGREE} shape: rank 0 asks for (8,), rank 3 for (7,)."
    assert faults_of_misuse(worlds(4).run(misuse, calls), [error] * 4) == []


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


def stay_away(rank: int, absent: int, is_agreed: bool) -> Waited | None:
    """All but one rank call."""
    if is_agreed:
        redistribute_good(rank)
    return None if rank == absent else timed(lambda: redistribute_good(rank))


@pytest.mark.parametrize("absent", [0, 2])
def test_rank_that_never_calls_is_named_by_the_others(worlds: Worlds, absent: int) -> None:
    world = hurried(worlds)
    waited = world.run(stay_away, absent, False)
    world.stop()
    error = (
        f"CommError: {WHOLE}: ranks [{absent}] did not join within 3 s. They may be in another "
        "call, or think that this transition has other ranks."
    )
    wanted = [None if rank == absent else error for rank in range(4)]
    assert [None if w is None else w.error for w in waited] == wanted
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS


@pytest.mark.parametrize("absent", [0, 2])
def test_rank_that_misses_a_later_call_is_an_error_on_the_others(
    worlds: Worlds, absent: int
) -> None:
    world = hurried(worlds)
    waited = world.run(stay_away, absent, True)
    world.stop()
    wanted = [None if rank == absent else "CommError" for rank in range(4)]
    assert classes_of(waited) == wanted
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS


def come_late(rank: int, late: int) -> Waited:
    """One rank calls when the others have given up."""
    if rank == late:
        time.sleep(TIMEOUT_SECS + 1.0)
    return timed(lambda: redistribute_good(rank))


def test_rank_that_comes_too_late_is_an_error_on_every_rank(worlds: Worlds) -> None:
    world = hurried(worlds)
    waited = world.run(come_late, 1)
    world.stop()
    assert classes_of(waited) == ["CommError"] * 4
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS


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


def wait_for_pending(rank: int, absent: int) -> Waited | None:
    redistribute_good(rank)
    if rank == absent:
        return None
    pending = redistribute_good(rank, async_op=True)
    return timed(pending.wait)


def test_error_of_a_pending_call_is_raised_by_wait(worlds: Worlds) -> None:
    world = hurried(worlds)
    waited = world.run(wait_for_pending, 3)
    world.stop()
    assert classes_of(waited) == ["CommError"] * 3 + [None]
    assert longest_secs(waited) < TIMEOUT_SECS + SLACK_SECS


# --- ranks that die -----------------------------------------------------------------------------


def die(rank: int, dying: int, is_agreed: bool) -> Waited:
    """One rank ends while the others call."""
    if is_agreed:
        redistribute_good(rank)
    if rank == dying:
        os._exit(1)
    return timed(lambda: redistribute_good(rank))


@pytest.mark.parametrize("is_agreed", [False, True], ids=["first call", "later call"])
# Rank 0 serves the store.
@pytest.mark.parametrize("dying", [0, 2])
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
    "shard of the wrong dtype": Call(dtype="float64"),
    "tensor that requires grad": Call(requires_grad=True),
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


def misuse_later_everywhere(rank: int, call: Call) -> tuple[Waited, Waited]:
    redistribute_good(rank)
    return timed(call), timed(lambda: redistribute_good(rank, seed=1))


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
def test_next_call_succeeds_after_a_bad_later_call_of_all_ranks(
    worlds: Worlds, call: Call, name: str
) -> None:
    bad, good = zip(*worlds(4).run(misuse_later_everywhere, call), strict=True)
    assert classes_of(bad) == [name] * 4
    assert faults_of([w.result for w in good], *GOOD, seed=1) == []


# --- Redistributor ------------------------------------------------------------------------------


def misuse_redistributor(rank: int, plan: rv.Plan, shape: tuple[int, ...], dtype: str) -> str:
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
    return error_of(lambda: rv.Redistributor(plan)(tensor))


@pytest.mark.parametrize(
    "shape, dtype, words",
    [((3,), "float32", "passed [3], its shard is [2]"), ((2,), "int8", "passed int8, the plan is")],
)
def test_redistributor_checks_its_tensor(
    worlds: Worlds, shape: tuple[int, ...], dtype: str, words: str
) -> None:
    errors = worlds(4).run(misuse_redistributor, rv.plan(*GOOD), shape, dtype)
    starts = [f"ShapeMismatchError: {SHORT}: rank {rank} {words}" for rank in range(4)]
    assert [e.startswith(s) for e, s in zip(errors, starts, strict=True)] == [True] * 4


def make_redistributor(rank: int, plan: rv.Plan) -> str:
    return error_of(lambda: rv.Redistributor(plan))


def test_redistributor_refuses_ranks_outside_the_group(worlds: Worlds) -> None:
    layout = rv.Layout((8,), "R(1)V(1)D(2)", [0, 7])
    errors = worlds(4).run(make_redistributor, rv.plan(layout, layout))
    what = "redistribute R(1)V(1)D(2) -> R(1)V(1)D(2)"
    words = "ranks [7] are outside the group, which has ranks 0 to 3."
    assert errors == [f"LayoutError: {what}: {words}"] * 4


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
