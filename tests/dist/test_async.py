"""A call with ``async_op=True`` runs while its caller computes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm.api.pending import (
    _POSTED,
    MOST_POSTED,
    Pending,
    Posted,
    SideStream,
    drain,
    posted,
    submit,
)
from rvdcomm.run.rank_program import RankProgram
from rvdcomm.run.world import World
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
ROWS, COLUMNS = rv.Layout((4, 6), "R(1)V(1)D(2,1)"), rv.Layout((4, 6), "R(1)V(1)D(1,2)")


def move(rank: int, seed: int = 0, **options: Any) -> Any:
    return rv.redistribute(shard_of(rank, ROWS, seed), ROWS, COLUMNS, **options)


# --- overlap and order --------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["dist", "peer"])
@on_ranks(2)
def test_the_caller_computes_while_a_call_is_under_way(rank: int, executor: str) -> None:
    """Rank 1 joins the call only after rank 0 has computed while the call was pending."""
    move(rank, executor=executor)
    store, done = World.of().store, f"computed/{executor}"
    if rank == 0:
        pending = move(rank, 1, executor=executor, async_op=True)
        values = torch.arange(5.0)
        for _ in range(10):
            values = values * 2
        assert not pending.is_completed()
        assert values.sum().item() == 10.0 * 2**10
        store.set(done, "yes")
    else:
        store.wait([done])
        pending = move(rank, 1, executor=executor, async_op=True)
    assert_moved(pending.wait(), ROWS, COLUMNS, 1)
    assert pending.is_completed()


@on_ranks(2)
def test_calls_finish_in_the_order_in_which_they_were_made(rank: int) -> None:
    finished: list[int] = []
    pending = [move(rank, seed, async_op=True) for seed in range(20)]
    for number, call in enumerate(pending):
        call.future.add_done_callback(lambda _, number=number: finished.append(number))
    for call in reversed(pending):
        call.wait()
    drain()
    assert finished == list(range(20))


@on_ranks(2)
def test_futures_can_be_awaited(rank: int) -> None:
    async def wait_for_all() -> list[Tensor]:
        pending = [move(rank, seed, async_op=True) for seed in range(4)]
        return await asyncio.gather(*(asyncio.wrap_future(call.future) for call in pending))

    for seed, result in enumerate(asyncio.run(wait_for_all())):
        assert_moved(result, ROWS, COLUMNS, seed)


@pytest.mark.parametrize("executor", ["dist", "peer"])
@on_ranks(2)
def test_several_asynchronous_redistribute_many_calls_are_correct(rank: int, executor: str) -> None:
    """Three asynchronous calls with state dicts, and a synchronous call after them."""
    names = ["a", "b"]
    src, dst = dict.fromkeys(names, ROWS), dict.fromkeys(names, COLUMNS)

    def start(seed: int, async_op: bool) -> Any:
        shards = {name: shard_of(rank, ROWS, seed) for name in names}
        return rv.redistribute_many(shards, src, dst, async_op=async_op, executor=executor)

    pending = [start(seed, True) for seed in range(3)]
    last = start(0, False)
    assert all(call.is_completed() for call in pending)
    for seed, result in zip((0, 1, 2, 0), [*(call.wait() for call in pending), last], strict=True):
        for name in names:
            assert_moved(result[name], ROWS, COLUMNS, seed)


@pytest.mark.parametrize("is_many", [False, True])
@on_ranks(2)
def test_first_call_of_a_transition_begins_after_the_calls_under_way(
    rank: int, is_many: bool
) -> None:
    run, whole = RankProgram.run, rv.Layout((4, 6), "R(2)V(1)D(1,1)")

    def run_slowly(program: RankProgram, *args: Any) -> None:
        time.sleep(0.1)
        run(program, *args)

    def started(dst: rv.Layout, seed: int) -> Pending:
        shard = shard_of(rank, ROWS, seed)
        if is_many:
            return rv.redistribute_many({"a": shard}, {"a": ROWS}, {"a": dst}, async_op=True)
        return rv.redistribute(shard, ROWS, dst, async_op=True)

    started(COLUMNS, 0).wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankProgram, "run", run_slowly)
        pending = [started(COLUMNS, seed) for seed in (1, 2)]
        last = started(whole, 3)
        assert all(call.is_completed() for call in pending)
        results = [call.wait() for call in (*pending, last)]
    for seed, (result, dst) in enumerate(zip(results, (COLUMNS, COLUMNS, whole), strict=True), 1):
        assert_moved(result["a"] if is_many else result, ROWS, dst, seed)


@pytest.mark.parametrize("kind", ["one", "many", "posted"])
@on_ranks(2)
def test_asynchronous_calls_write_tensors_of_inference_mode(rank: int, kind: str) -> None:
    """A call in the background writes what a call in the foreground writes."""

    def call(out: Tensor | None, **options: Any) -> Any:
        if kind != "many":
            src, dst = (HERE, THERE) if kind == "posted" else (ROWS, COLUMNS)
            shard = shard_of(rank, src)
            return rv.redistribute(shard, src, dst, out=out, executor="dist", **options)
        layouts, shard = {"a": ROWS}, shard_of(rank, ROWS)
        return rv.redistribute_many(
            {"a": None if shard is None else shard.to(torch.float8_e4m3fn)}, layouts, layouts,
            out={"a": out}, dst_dtype=torch.float32, scale=2.0, **options
        )  # fmt: skip

    with torch.inference_mode():
        shapes = {"many": (6, 2), "posted": (6, 4), "one": (3, 4)}
        outs = [torch.zeros(shapes[kind]).t() for _ in range(2)]
        if kind == "posted" and rank == 0:
            outs = [None, None]
        call(outs[0])
        pending = call(outs[1], async_op=True)
    pending.wait()
    assert isinstance(pending, Posted) == (kind == "posted")
    assert outs[0] is None or torch.equal(*outs)


# --- messages alone, which the caller posts -----------------------------------------------------

HERE, THERE = (rv.Layout((4, 6), "R(1)V(1)D(1,1)", [rank]) for rank in (0, 1))


def sender() -> rv.Redistributor:
    return rv.Redistributor(rv.plan(HERE, THERE, "float32", executor="dist"))


@pytest.mark.parametrize("num_calls", [6, MOST_POSTED + 8])
@on_ranks(2)
def test_posted_messages_are_finished_by_wait(rank: int, num_calls: int) -> None:
    """Drop call 0, wait for call 1 by its future, for others in reverse; call 3 has ``out``."""
    call, out = sender(), torch.empty(6, 4).t() if rank == 1 else None
    pending = [
        call(shard_of(rank, HERE, seed), out=out if seed == 3 else None, requires_grad=False,
             async_op=True)
        for seed in range(num_calls)
    ]  # fmt: skip
    assert all(isinstance(one, Posted) for one in pending)
    del pending[0]
    results = [pending[0].future.result(), *(one.wait() for one in pending[:0:-1])]
    assert pending[2].wait() is pending[2].future.result()
    assert rank == 0 or pending[2].wait() is out
    move(rank, executor="dist")
    for seed, result in zip([1, *range(num_calls - 1, 1, -1)], results, strict=True):
        assert_moved(result, HERE, THERE, seed)


@pytest.mark.parametrize("has_tags", [True, False])
@on_ranks(2)
def test_ranks_may_post_transitions_in_different_orders(rank: int, has_tags: bool) -> None:
    """Without tags, as with NCCL, every transition has its own communicator."""
    turned = [rv.Layout((6, 4), "R(1)V(1)D(1,1)", [rank]) for rank in (0, 1)]
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "has_tags", has_tags)
        calls = [
            rv.Redistributor(rv.plan(*pair, "float32", executor="dist"), group)
            for pair in ((HERE, THERE), turned)
        ]
        assert all(call.is_posted == has_tags for call in calls)
        for call in calls:
            call.prepare_post()
        assert all(call.is_posted for call in calls)
        order = [(0, 1), (0, 2), (1, 3), (1, 4)]
        found = {}
        for number, seed in order if rank == 0 else [order[i] for i in (2, 0, 3, 1)]:
            shard = shard_of(rank, (HERE, turned[0])[number], seed)
            found[number, seed] = calls[number](shard, requires_grad=False, async_op=True)
        for number, seed in order:
            pair = turned if number else (HERE, THERE)
            assert_moved(found[number, seed].wait(), *pair, seed)
    dist.destroy_process_group(group)


@on_ranks(2)
def test_is_completed_of_a_posted_call_does_not_block_collectives(rank: int) -> None:
    """Rank 0 sends after a background collective, which rank 1 starts after its posted receive."""
    call = sender()
    if rank == 0:
        move(rank, 1, async_op=True).wait()
        sent = call(shard_of(rank, HERE), requires_grad=False, async_op=True)
        sent.wait()
        assert sent.is_completed()
        return
    pending = call(None, requires_grad=False, async_op=True)
    assert not pending.is_completed()
    move(rank, 1, async_op=True).wait()
    while not pending.is_completed():
        time.sleep(1e-3)
    assert torch.equal(pending.wait(), shard_of(0, HERE))


@on_ranks(2)
def test_forgotten_call_is_not_tracked_but_can_be_waited_for(rank: int) -> None:
    call, before = sender(), len(_POSTED)
    pending = call(shard_of(rank, HERE), requires_grad=False, async_op=True)
    pending.forget()
    assert len(_POSTED) == before
    assert_moved(pending.wait(), HERE, THERE)


@on_ranks(2)
def test_every_wait_returns_the_same_tensor(rank: int) -> None:
    pending = rv.redistribute(shard_of(rank, ROWS).requires_grad_(), ROWS, COLUMNS, async_op=True)
    assert pending.wait() is pending.wait() is pending.future.result()


# --- errors and ends ----------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_shape_in_an_asynchronous_call_raises_at_once_on_every_rank(rank: int) -> None:
    # The layouts are known, the shape is wrong: the ranks compare requests, and all raise.
    move(rank)
    what = f"redistribute {ROWS.rvd} -> {COLUMNS.rvd}"
    error = error_of(lambda: rv.redistribute(torch.zeros(3, 6), ROWS, COLUMNS, async_op=True))
    assert error == f"ShapeMismatchError: {what}: rank 0 passed [3, 6], its shard is [2, 6]."
    assert_moved(move(rank, 2, async_op=True).wait(), ROWS, COLUMNS, 2)


@on_ranks(2)
def test_error_in_the_background_is_raised_only_by_its_call(rank: int) -> None:
    """A call fails in the background before it sends; a later call succeeds."""
    call = rv.Redistributor(rv.plan(ROWS, COLUMNS))
    program = call._program
    call._program = None
    pending = call(shard_of(rank, ROWS), async_op=True)
    drain()
    call._program = program
    for _ in range(2):
        assert error_of(pending.wait).startswith("AttributeError:")
    assert_moved(call(shard_of(rank, ROWS, 3)), ROWS, COLUMNS, 3)


def test_callback_that_would_wait_for_its_own_thread_raises() -> None:
    go, errors = threading.Event(), []

    def call_from_callback(_: object) -> None:
        errors.extend(map(error_of, (drain, lambda: submit(drain, CPU, ()), later.wait)))

    first = submit(go.wait, CPU, ())
    first.future.add_done_callback(call_from_callback)
    later = submit(lambda: 7, CPU, ())
    go.set()
    assert later.wait() == 7
    wanted = "LayoutError: a call inside a callback of a call with async_op=True"
    assert len(errors) == 3
    assert [error.startswith(wanted) for error in errors] == [True, True, False]
    assert errors[2].startswith("LayoutError: wait() of a call in the background inside a callback")


DROPPING = """
    import sys, time
    import torch, torch.distributed as dist
    import rvdcomm as rv

    rank = int(sys.argv[1])
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    src, dst = rv.Layout((4,), "R(1)V(1)D(2)"), rv.Layout((4,), "R(2)V(1)D(1)")
    shard = torch.arange(2.0) + 2 * rank
    rv.redistribute(shard, src, dst)
    if rank == 0:
        rv.redistribute(shard + 1, src, dst, async_op=True)
    else:
        time.sleep(0.5)
        print(rv.redistribute(shard + 1, src, dst).tolist())
"""


def test_process_exit_finishes_dropped_asynchronous_calls(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(DROPPING)]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=100)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    assert printed == ["", "[1.0, 2.0, 3.0, 4.0]\n"]


# --- the stream of a GPU ------------------------------------------------------------------------


class FakeStream:
    """Records the calls on a stream."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for the event on {event.recorded_on}")


class FakeEvent:
    recorded_on = "no stream"

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream.name


class FakeTensor:
    is_cuda = True

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"{self.name} is used on {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of calls on a fake GPU, where the stream of the caller is named ``caller``."""
    log: list[str] = []
    current = [FakeStream("caller", log)]

    @contextmanager
    def stream(side: FakeStream) -> Iterator[None]:
        current.append(side)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", log))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return log


def started(log: list[str]) -> tuple[SideStream, Pending]:
    side = SideStream(torch.device("cuda", 0))

    def job() -> Any:
        log.append(f"job on {torch.cuda.current_stream(None).name}")
        return FakeTensor("dst", log)

    return side, side.submit(job, [FakeTensor("src", log)])


def test_gpu_call_runs_on_a_side_stream_between_what_the_caller_does(log: list[str]) -> None:
    side, pending = started(log)
    pending.future.result()
    assert log == ["side waits for caller", "src is used on side", "job on side"]
    side.drain()
    pending.wait()
    waited = ["caller waits for the event on side", "dst is used on caller"]
    assert log[3:] == ["caller waits for side", *waited]


def test_posted_gpu_call_finishes_on_the_stream_of_the_waiting_caller(log: list[str]) -> None:
    def finish() -> Any:
        log.append("messages have come")
        return FakeTensor("dst", log)

    pending = posted(finish, torch.device("cuda", 0))
    assert log == []
    for _ in range(2):
        assert pending.wait() is pending.wait()
    assert log == [
        "messages have come",
        *["caller waits for the event on caller", "dst is used on caller"] * 4,
    ]
