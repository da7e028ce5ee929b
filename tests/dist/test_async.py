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
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import Worlds

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
ROWS, COLUMNS = rv.Layout((4, 6), "R(1)V(1)D(2,1)"), rv.Layout((4, 6), "R(1)V(1)D(1,2)")


def move(rank: int, seed: int = 0, **options: Any) -> Any:
    return rv.redistribute(shard_of(rank, ROWS, seed), ROWS, COLUMNS, **options)


# --- overlap ------------------------------------------------------------------------------------


def compute_meanwhile(rank: int, num_steps: int, executor: str) -> tuple[Any, list[Any]]:
    """Rank 1 joins the call only after rank 0 has computed while the call was pending."""
    move(rank, executor=executor)
    store, done = World.of().store, f"computed/{executor}"
    seen: list[Any] = []
    if rank == 0:
        pending = move(rank, 1, executor=executor, async_op=True)
        values = torch.arange(5.0)
        for _ in range(num_steps):
            values = values * 2
        seen = [pending.is_completed(), values.sum().item()]
        store.set(done, "yes")
    else:
        store.wait([done])
        pending = move(rank, 1, executor=executor, async_op=True)
    result = pending.wait()
    return result.numpy(), [*seen, pending.is_completed()]


@pytest.mark.parametrize("executor", ["dist", "peer"])
def test_the_caller_computes_while_a_call_is_under_way(worlds: Worlds, executor: str) -> None:
    results, seen = zip(*worlds(2).run(compute_meanwhile, 10, executor), strict=True)
    assert faults_of(results, ROWS, COLUMNS, seed=1) == []
    assert seen == ([False, 10.0 * 2**10, True], [True])


# --- order --------------------------------------------------------------------------------------


def finish_in_order(rank: int, num_calls: int) -> list[int]:
    finished: list[int] = []
    pending = [move(rank, seed, async_op=True) for seed in range(num_calls)]
    for number, call in enumerate(pending):
        call.future.add_done_callback(lambda _, number=number: finished.append(number))
    for call in reversed(pending):
        call.wait()
    drain()
    return finished


def test_calls_finish_in_the_order_in_which_they_were_made(worlds: Worlds) -> None:
    assert worlds(2).run(finish_in_order, 20) == [list(range(20))] * 2


def gather_futures(rank: int, num_calls: int) -> list[Any]:
    async def wait_for_all() -> list[Tensor]:
        pending = [move(rank, seed, async_op=True) for seed in range(num_calls)]
        return await asyncio.gather(*(asyncio.wrap_future(call.future) for call in pending))

    return [result.numpy() for result in asyncio.run(wait_for_all())]


def test_futures_can_be_awaited(worlds: Worlds) -> None:
    calls = zip(*worlds(2).run(gather_futures, 4), strict=True)
    faults = [faults_of(results, ROWS, COLUMNS, seed) for seed, results in enumerate(calls)]
    assert faults == [[]] * 4


def move_many(rank: int, executor: str) -> tuple[bool, list[Any]]:
    """Three asynchronous calls with state dicts, and a synchronous call after them."""
    names = ["a", "b"]
    src, dst = dict.fromkeys(names, ROWS), dict.fromkeys(names, COLUMNS)
    shards = [{name: shard_of(rank, ROWS, seed) for name in names} for seed in range(3)]
    pending = [
        rv.redistribute_many(shard, src, dst, async_op=True, executor=executor) for shard in shards
    ]
    last = rv.redistribute_many(shards[0], src, dst, executor=executor)
    done = all(call.is_completed() for call in pending)
    results = [*(call.wait() for call in pending), last]
    return done, [result[name].numpy() for result in results for name in names]


@pytest.mark.parametrize("executor", ["dist", "peer"])
def test_several_asynchronous_redistribute_many_calls_are_correct(
    worlds: Worlds, executor: str
) -> None:
    found = worlds(2).run(move_many, executor)
    assert all(done for done, _ in found)
    calls = zip(*(results for _, results in found), strict=True)
    seeds = [seed for seed in (0, 1, 2, 0) for _ in range(2)]
    faults = [
        faults_of(results, ROWS, COLUMNS, seed) for results, seed in zip(calls, seeds, strict=True)
    ]
    assert faults == [[]] * len(seeds)


def call_first_among_calls(rank: int, is_many: bool) -> tuple[list[bool], list[Any]]:
    """Another transition is first called while slow calls are under way."""
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
        done = [call.is_completed() for call in pending]
        results = [call.wait() for call in (*pending, last)]
    return done, [result["a"] if is_many else result for result in results]


@pytest.mark.parametrize("is_many", [False, True])
def test_first_call_of_a_transition_begins_after_the_calls_under_way(
    worlds: Worlds, is_many: bool
) -> None:
    done, found = zip(*worlds(2).run(call_first_among_calls, is_many), strict=True)
    assert done == ([True, True], [True, True])
    wanted = (COLUMNS, COLUMNS, rv.Layout((4, 6), "R(2)V(1)D(1,1)"))
    for seed, (results, dst) in enumerate(zip(zip(*found, strict=True), wanted, strict=True), 1):
        assert faults_of(results, ROWS, dst, seed) == []


def write_inference_tensor(rank: int, kind: str) -> tuple[bool, bool]:
    """Whether the call was posted, and whether it writes what a call in the foreground writes."""

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
    return isinstance(pending, Posted), outs[0] is None or torch.equal(*outs)


@pytest.mark.parametrize("kind", ["one", "many", "posted"])
def test_asynchronous_calls_write_tensors_of_inference_mode(worlds: Worlds, kind: str) -> None:
    found = worlds(2).run(write_inference_tensor, kind)
    assert found == [(kind == "posted", True)] * 2


# --- messages alone, which the caller posts -----------------------------------------------------

HERE, THERE = (rv.Layout((4, 6), "R(1)V(1)D(1,1)", [rank]) for rank in (0, 1))


def post(rank: int, num_calls: int) -> tuple[bool, list[Any]]:
    """Drop call 0, wait for call 1 by its future, for others in reverse; call 3 has ``out``."""
    call = rv.Redistributor(rv.plan(HERE, THERE, "float32", executor="dist"))
    out = torch.empty(6, 4).t() if rank == 1 else None
    pending = [
        call(shard_of(rank, HERE, seed), out=out if seed == 3 else None, requires_grad=False,
             async_op=True)
        for seed in range(num_calls)
    ]  # fmt: skip
    is_posted = all(isinstance(one, Posted) for one in pending)
    del pending[0]
    results = [pending[0].future.result(), *(one.wait() for one in pending[:0:-1])]
    assert pending[2].wait() is pending[2].future.result()
    assert rank == 0 or pending[2].wait() is out
    move(rank, executor="dist")
    return is_posted, [None if one is None else one.numpy() for one in results]


@pytest.mark.parametrize("num_calls", [6, MOST_POSTED + 8])
def test_posted_messages_are_finished_by_wait(worlds: Worlds, num_calls: int) -> None:
    posted, found = zip(*worlds(2).run(post, num_calls), strict=True)
    assert posted == (True, True)
    seeds = [1, *range(num_calls - 1, 1, -1)]
    for results, seed in zip(zip(*found, strict=True), seeds, strict=True):
        assert faults_of(results, HERE, THERE, seed) == []


def post_in_another_order(rank: int, has_tags: bool) -> list[Any]:
    """Rank 0 calls one transition twice, then another twice; rank 1 calls them in mixed order."""
    turned = rv.Layout((6, 4), "R(1)V(1)D(1,1)", [0]), rv.Layout((6, 4), "R(1)V(1)D(1,1)", [1])
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
        found = posted_in_another_order(rank, calls, (HERE, turned[0]))
    dist.destroy_process_group(group)
    return found


def posted_in_another_order(
    rank: int, calls: list[rv.Redistributor], layouts: tuple[rv.Layout, rv.Layout]
) -> list[Any]:

    def begun(number: int, seed: int) -> Pending:
        shard = shard_of(rank, layouts[number], seed)
        pending: Pending = calls[number](shard, requires_grad=False, async_op=True)
        return pending

    order = [(0, 1), (0, 2), (1, 3), (1, 4)]
    here = order if rank == 0 else [order[i] for i in (2, 0, 3, 1)]
    found = {one: begun(*one) for one in here}
    return [found[one].wait() for one in order]


@pytest.mark.parametrize("has_tags", [True, False])
def test_ranks_may_post_transitions_in_different_orders(worlds: Worlds, has_tags: bool) -> None:
    """Without tags, as with NCCL, every transition has its own communicator."""
    _, found = worlds(2).run(post_in_another_order, has_tags)
    turned = rv.Layout((6, 4), "R(1)V(1)D(1,1)", [0])
    for result, layout, seed in zip(found, (HERE, HERE, turned, turned), (1, 2, 3, 4), strict=True):
        assert torch.equal(result, shard_of(0, layout, seed))


def ask_whether_it_is_completed(rank: int) -> list[bool]:
    """Rank 0 sends after a background collective, which rank 1 starts after its posted receive."""
    call = rv.Redistributor(rv.plan(HERE, THERE, "float32", executor="dist"))
    if rank == 0:
        move(rank, 1, async_op=True).wait()
        sent = call(shard_of(rank, HERE), requires_grad=False, async_op=True)
        sent.wait()
        return [sent.is_completed()]
    pending = call(None, requires_grad=False, async_op=True)
    early = pending.is_completed()
    move(rank, 1, async_op=True).wait()
    while not pending.is_completed():
        time.sleep(1e-3)
    return [early, torch.equal(pending.wait(), shard_of(0, HERE))]


def test_is_completed_of_a_posted_call_does_not_block_collectives(worlds: Worlds) -> None:
    assert worlds(2).run(ask_whether_it_is_completed) == [[True], [False, True]]


def forget(rank: int) -> tuple[int, Any]:
    call = rv.Redistributor(rv.plan(HERE, THERE, "float32", executor="dist"))
    before = len(_POSTED)
    pending = call(shard_of(rank, HERE), requires_grad=False, async_op=True)
    pending.forget()
    return len(_POSTED) - before, pending.wait()


def test_forgotten_call_is_not_tracked_but_can_be_waited_for(worlds: Worlds) -> None:
    (left, _), (left_there, result) = worlds(2).run(forget)
    assert left == left_there == 0
    assert torch.equal(result, shard_of(0, HERE))


def wait_twice(rank: int) -> bool:
    pending = rv.redistribute(shard_of(rank, ROWS).requires_grad_(), ROWS, COLUMNS, async_op=True)
    return pending.wait() is pending.wait() is pending.future.result()


def test_every_wait_returns_the_same_tensor(worlds: Worlds) -> None:
    assert worlds(2).run(wait_twice) == [True] * 2


# --- errors and ends ----------------------------------------------------------------------------


def pass_a_wrong_shard(rank: int) -> tuple[str, Any]:
    move(rank)
    error = error_of(lambda: rv.redistribute(torch.zeros(3, 6), ROWS, COLUMNS, async_op=True))
    return error, move(rank, 2, async_op=True).wait().numpy()


def test_wrong_shape_in_an_asynchronous_call_raises_at_once_on_every_rank(worlds: Worlds) -> None:
    # The layouts are known, the shape is wrong: the ranks compare requests, and all raise.
    errors, results = zip(*worlds(2).run(pass_a_wrong_shard), strict=True)
    what = f"redistribute {ROWS.rvd} -> {COLUMNS.rvd}"
    assert (
        errors == (f"ShapeMismatchError: {what}: rank 0 passed [3, 6], its shard is [2, 6].",) * 2
    )
    assert faults_of(results, ROWS, COLUMNS, seed=2) == []


def fail_in_the_background(rank: int) -> tuple[list[str], Any]:
    """A call fails in the background before it sends; a later call succeeds."""
    call = rv.Redistributor(rv.plan(ROWS, COLUMNS))
    program = call._program
    call._program = None
    pending = call(shard_of(rank, ROWS), async_op=True)
    drain()
    call._program = program
    errors = [error_of(pending.wait) for _ in range(2)]
    return errors, call(shard_of(rank, ROWS, 3)).numpy()


def test_error_in_the_background_is_raised_only_by_its_call(worlds: Worlds) -> None:
    errors, results = zip(*worlds(2).run(fail_in_the_background), strict=True)
    assert {error.partition(":")[0] for pair in errors for error in pair} == {"AttributeError"}
    assert faults_of(results, ROWS, COLUMNS, seed=3) == []


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


def test_gpu_call_runs_on_a_side_stream_after_the_stream_of_the_caller(log: list[str]) -> None:
    _, pending = started(log)
    pending.future.result()
    assert log == ["side waits for caller", "src is used on side", "job on side"]


def test_wait_makes_the_stream_of_the_caller_wait_for_the_side_stream(log: list[str]) -> None:
    _, pending = started(log)
    pending.wait()
    assert log[3:] == ["caller waits for the event on side", "dst is used on caller"]


def test_drain_makes_the_stream_of_the_caller_wait_for_the_side_stream(log: list[str]) -> None:
    side, pending = started(log)
    pending.future.result()
    side.drain()
    assert log[3:] == ["caller waits for side"]


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
