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
from tests.dist.shards import error_of, shard_of
from tests.dist.world import Worlds

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


TIMEOUT_SECS = 3.0
# The time that a rank needs besides waiting, on a machine that has other work, too.
SLACK_SECS = 3.0


def hurried_group(timeout_secs: float = TIMEOUT_SECS) -> Any:
    """A new group with a short timeout, in which nothing is agreed yet, and all are connected."""
    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=timeout_secs))
    # A rank that ends while others still connect is an error of gloo, before any call of ours.
    dist.barrier()
    return group


def redistribute_good(rank: int, seed: int = 0, **options: Any) -> Any:
    src, dst = GOOD
    return rv.redistribute(shard_of(rank, src, seed), src, dst, **options)


def assert_refused(rank: int, call: Call | None, error: str) -> None:
    """An error that begins so comes before any byte is sent; a good call after it succeeds."""
    group = hurried_group(10.0)
    with counted_backend_calls() as names:
        found = "none" if call is None else error_of(lambda: call(group))
    assert found.startswith(error)
    assert names == []
    assert_moved(redistribute_good(rank, group=group), *GOOD, group=group)


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
@on_ranks(4)
def test_bad_input_is_an_error_on_every_rank(rank: int, what: str) -> None:
    call, name, fact = ALL_SAME[what]
    assert_refused(rank, call, f"{name}: redistribute {call.src} -> {call.dst}: {fact}")


@on_ranks(4)
def test_rank_outside_the_group_is_an_error_on_the_others(rank: int) -> None:
    layout = rv.Layout((8,), "R(1)V(1)D(4)", [5, 0, 1, 2])
    what = f"redistribute {layout} -> {layout}"
    error = f"LayoutError: {what}: ranks [5] are outside the group, which has ranks 0 to 3."
    call = Call(src=layout, dst=layout)
    assert_refused(rank, *((call, error) if rank < 3 else (None, "none")))


@on_ranks(4)
def test_call_of_a_rank_in_neither_layout_is_an_error_on_that_rank_only(rank: int) -> None:
    src, dst = (rv.Layout((6,), text, [0, 1, 3]) for text in ("R(1)V(1)D(3)", "R(3)V(1)D(1)"))
    what = "redistribute R(1)V(1)D(3) shape(6) ranks(0,1,3) -> R(3)V(1)D(1) shape(6) ranks(0,1,3)"
    error = f"{what}: rank 2 called it but is in neither layout, which have ranks 0,1,3."
    found = error_of(Call(src, dst, shard=None if rank == 2 else (2,)))
    assert found == ("none" if rank != 2 else f"LayoutError: {error}")


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
@on_ranks(4)
def test_bad_input_on_one_rank_is_an_error_on_every_rank(rank: int, what: str) -> None:
    call, error = ONE_RANK_BAD[what]
    assert_refused(rank, call if rank == 2 else Call(), error)


# --- ranks that do not come ---------------------------------------------------------------------


@dataclass(frozen=True)
class Waited:
    """The error that a rank got from a call, or "none", and how long that took."""

    error: str
    secs: float


def timed(call: Callable[[], Any]) -> Waited:
    start = time.monotonic()
    error = error_of(call)
    return Waited(error, time.monotonic() - start)


def assert_told(waited: Waited, names: Sequence[str] = ("CommError",)) -> None:
    """The call raised an error of one of these classes, in time."""
    assert waited.error.partition(":")[0] in names, waited
    assert waited.secs < TIMEOUT_SECS + SLACK_SECS, waited


@pytest.mark.parametrize(
    "absent, is_agreed, is_late, is_pending",
    [(0, False, False, False), (2, True, False, False), (1, False, True, False),
     (3, True, False, True)],
    ids=["never", "not again", "too late", "pending"],
)  # fmt: skip
@on_ranks(4)
def test_rank_that_misses_a_call_is_an_error_on_the_others(
    rank: int, absent: int, is_agreed: bool, is_late: bool, is_pending: bool
) -> None:
    """All but one rank call, which does not, or when the others have given up."""
    group = hurried_group()
    if is_agreed:
        redistribute_good(rank, group=group)
    if rank == absent:
        if not is_late:
            return
        time.sleep(TIMEOUT_SECS + 1.0)
    if is_pending:
        waited = timed(redistribute_good(rank, group=group, async_op=True).wait)
    else:
        waited = timed(lambda: redistribute_good(rank, group=group))
    assert_told(waited)
    assert (
        is_agreed
        or is_late
        or waited.error
        == (
            f"CommError: {WHOLE}: ranks [{absent}] did not join within 3 s. They may be in another "
            "call, or think that this transition has other ranks."
        )
    )


def fail_again(rank: int, group: Any) -> Waited:
    """The same call in the group that failed; in a new one it succeeds."""
    dist.barrier()
    again = timed(lambda: redistribute_good(rank, seed=1, group=group))
    assert_told(again)
    dist.barrier()
    anew = redistribute_good(rank, seed=1, group=dist.new_group(list(range(4))))
    assert_moved(anew, *GOOD, seed=1)
    return again


@on_ranks(4)
def test_group_is_failed_on_every_rank_after_one_rank_missed_a_call(rank: int) -> None:
    group = hurried_group()
    if rank == 2:
        time.sleep(TIMEOUT_SECS)
        fail_again(rank, group)
        return
    assert_told(timed(lambda: redistribute_good(rank, group=group)))
    again = fail_again(rank, group)
    assert "failed in an earlier call: CommError: redistribute" in again.error
    assert "ranks [2] did not join within 3 s" in again.error
    assert again.error.endswith("init_process_group, or new_group.")
    assert again.secs < SLACK_SECS, "nobody waits for a group that failed"


@on_ranks(4)
def test_disagreement_about_the_members_is_an_error_in_time_on_every_rank(rank: int) -> None:
    """Rank 1 calls a transition of ranks 0 and 1; the others call one of all ranks."""
    pair = rv.Layout((8,), "R(1)V(1)D(2)", [0, 1]), rv.Layout((8,), "R(2)V(1)D(1)", [0, 1])
    src, dst = pair if rank == 1 else GOOD
    group = hurried_group()
    first = timed(lambda: rv.redistribute(shard_of(rank, src), src, dst, group=group))
    assert_told(first)
    assert f"ranks [{0 if rank == 1 else 1}] did not join" in first.error
    fail_again(rank, group)


# --- ranks that die -----------------------------------------------------------------------------


def die(rank: int, dying: int, is_agreed: bool) -> None:
    """One rank ends while the others call."""
    group = hurried_group()
    if is_agreed:
        redistribute_good(rank, group=group)
    if rank == dying:
        os._exit(1)
    assert_told(timed(lambda: redistribute_good(rank, group=group)))


# Rank 0 serves the store.
@pytest.mark.parametrize("dying, is_agreed", [(0, True), (2, False)])
def test_death_of_a_rank_is_an_error_on_the_others(
    worlds: Worlds, dying: int, is_agreed: bool
) -> None:
    worlds(4).run(die, dying, is_agreed, dying=[dying])


# --- bad input in a later call ------------------------------------------------------------------


FEWER = [rv.Layout((8,), text, [1, 2]) for text in ("R(1)V(1)D(2)", "R(2)V(1)D(1)")]
LATER = {
    "shard of the wrong shape": Call(shard=(3,)),
    "other dst": Call(dst=rv.Layout((8,), "R(1)V(4)D(1)")),
    "fewer ranks": Call(*FEWER, shard=(4,)),
}


@pytest.mark.parametrize("what", LATER)
@on_ranks(4)
def test_bad_later_call_of_one_rank_is_an_error_in_time_on_every_rank(rank: int, what: str) -> None:
    """All ranks have agreed on the transition of the default call."""
    group = hurried_group()
    redistribute_good(rank, group=group)
    if rank == 2:
        waited = timed(lambda: LATER[what](group))
        assert_told(waited, ("LayoutError", "ShapeMismatchError", "CommError"))
    else:
        assert_told(timed(lambda: Call()(group)))


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


@on_ranks(4)
def test_rank_that_creates_no_redistributor_is_an_error_on_the_others(rank: int) -> None:
    group = hurried_group()
    if rank != 1:
        assert_told(timed(lambda: rv.Redistributor(rv.plan(*GOOD), group)))


def test_redistribute_without_a_process_group_is_an_error() -> None:
    words = r"torch.distributed is not initialized; call init_process_group first"
    with pytest.raises(rv.CommError, match=words):
        rv.redistribute(torch.zeros(2), *GOOD)
