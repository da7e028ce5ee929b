"""Peers that die, give up or stay away: the others name the rank, none hangs, nothing is left.

Ranks that are killed need a world of their own each, so these are cheaper than ``ProcessWorld``: a
*lane* is a process that has imported torch and never starts a thread of it. It forks the ranks of a
world, kills one, collects what the others say, and goes on to the next world.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing as mp
import os
import random
import re
import secrets
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm import native
from rvdcomm.run.world import World
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of
from tests.dist.world import Worlds
from tests.oracle import parts_of

pytestmark = [
    pytest.mark.dist,
    pytest.mark.alone,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

TIMEOUT_SECS = 20.0
# A death is noticed after 50 ms; the rest is for a busy machine.
SOON_SECS = 5.0
# Ranks that still compile meet through the store, which does not know who is dead.
COMPILE_TIMEOUT_SECS = 3.0
NUM_LANES = 3
# Most of their time goes into waiting.
NUM_COMPILING_LANES = 8
# Upper limits of the time that a world takes to start, and to end.
START_SECS = 15.0
WORLD_SECS = 60.0

TRANSITIONS = {
    3: [
        ((54, 35), "R(1)V(3)D(1,1)", "R(3)V(1)D(1,1)"),
        ((801, 640), "R(1)V(3)D(1,1)", "R(1)V(1)D(3,1)"),  # in slices
        ((54, 35), "R(1)V(1)D(3,1)", "R(1)V(1)D(1,3)"),
        ((801, 640), "R(1)V(1)D(1,3)", "R(3)V(1)D(1,1)"),  # in slices
        ((54, 35), "R(3)V(1)D(1,1)", "R(1)V(1)D(1,3)"),
    ],
    4: [
        ((801, 640), "R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),  # in slices
        ((54, 35), "R(1)V(2)D(2,1)", "R(2)V(1)D(1,2)"),
        ((54, 35), "R(1)V(1)D(4,1)", "R(1)V(1)D(2,2)"),
        ((801, 640), "R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
        ((54, 35), "R(2)V(1)D(1,2)", "R(1)V(1)D(4,1)"),
    ],
}
"""What worlds of 3 and 4 ranks do: each makes some of these calls, again and again."""


# --- worlds of which one rank is killed ---------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """A world, and how it loses a rank.

    ``calls`` are indices in ``TRANSITIONS``. ``delay_secs`` is the time from the moment when all
    ranks go on, to make their first call or to compile, to the death of the victim.
    """

    num_ranks: int
    victim: int
    delay_secs: float
    calls: tuple[int, ...]
    is_compiling: bool = False
    serves_store: bool = False

    @classmethod
    def draw(cls, seed: int, num_ranks: int, is_compiling: bool) -> Kill:
        """A random one; every second world that compiles has its store on rank 0."""
        draw = random.Random(f"{seed}/{num_ranks}/{is_compiling}")
        return cls(
            num_ranks=num_ranks,
            victim=draw.randrange(num_ranks),
            delay_secs=draw.uniform(0.0, 0.03),
            calls=tuple(draw.sample(range(len(TRANSITIONS[num_ranks])), 2)),
            is_compiling=is_compiling,
            serves_store=is_compiling and bool(seed % 2),
        )

    @property
    def timeout_secs(self) -> float:
        """The timeout of what the ranks do."""
        return COMPILE_TIMEOUT_SECS if self.is_compiling else TIMEOUT_SECS


@dataclass
class Outcome:
    """The end of a world: error and delay of each survivor, exit statuses, and hung ranks."""

    kill: Kill
    errors: dict[int, tuple[str, float]] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Differences from the wanted outcome."""
        survivors = [rank for rank in range(self.kill.num_ranks) if rank != self.kill.victim]
        faults = [f"rank {rank} hung" for rank in self.hung]
        faults += [
            f"rank {r}: status {self.statuses.get(r)}" for r in survivors if self.statuses.get(r)
        ]
        for rank in survivors:
            text, secs = self.errors.get(rank, ("no report", 0.0))
            if not self._names_the_victim(text) or secs > self._limit_secs(text):
                faults.append(f"rank {rank}, {secs:.2f} s after: {text}")
        return [f"{self.kill}: {fault}" for fault in faults]

    def _names_the_victim(self, text: str) -> bool:
        victim = self.kill.victim
        known = [f"rank {victim} died"]
        if self.kill.is_compiling:
            known += [f"ranks [{victim}] did not join", f"rank {victim} is gone"]
            # Others may have left because of it.
            if found := re.search(r"ranks ([0-9 and]+) are gone", text):
                known += [found[0]] if str(victim) in found[1].split(" and ") else []
        if self.kill.serves_store and victim == 0:
            # Nothing says who serves a store: a rank that knows the victim only by its store names
            # that, and its loss is seen as silence or as a closed connection.
            known.append("ranks that serve the store, or others, did not join")
            known.append("the store of the process group is lost")
        return text.startswith("CommError: ") and any(each in text for each in known)

    def _limit_secs(self, text: str) -> float:
        # A rank may wait half of the timeout for links, and then for the agreement of all.
        return SOON_SECS + (1.5 * self.kill.timeout_secs if "did not join" in text else 0.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_rank_killed_at_any_time_is_named_by_all_others(num_ranks: int) -> None:
    kills = [Kill.draw(seed, num_ranks, is_compiling=False) for seed in range(40)]
    assert faults_of_kills(kills) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_rank_killed_while_ranks_compile_is_named_by_all_others(num_ranks: int) -> None:
    kills = [Kill.draw(seed, num_ranks, is_compiling=True) for seed in range(12)]
    assert faults_of_kills(kills) == []


def faults_of_kills(kills: Sequence[Kill]) -> list[str]:
    """What is wrong with any of these worlds, or left of them."""
    before = names()
    count = NUM_COMPILING_LANES if kills[0].is_compiling else NUM_LANES
    with ThreadPoolExecutor(count) as lanes:
        parts = lanes.map(run_lane, [list(kills[i::count]) for i in range(count)])
        outcomes = [outcome for part in parts for outcome in part]
    assert len(outcomes) == len(kills)
    return [fault for outcome in outcomes for fault in outcome.faults()] + left_since(before)


def names() -> set[str]:
    """Named objects that a crashed rank could leave: files in shared memory, and our sockets."""
    sockets = Path("/proc/net/unix").read_text().split()
    files = os.listdir("/dev/shm") if Path("/dev/shm").exists() else []
    return {f"/dev/shm/{name}" for name in files} | {s for s in sockets if tag_of(os.getpid()) in s}


def tag_of(pid: int) -> str:
    """What the sockets of the worlds of this test process have in their names."""
    return f"-of-{pid}-"


def left_since(before: set[str]) -> list[str]:
    """Names that are new, and stay."""
    deadline = time.monotonic() + SOON_SECS
    while (left := names() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"left: {name}" for name in sorted(left)]


def run_lane(kills: list[Kill]) -> list[Outcome]:
    """Let a new process run these worlds one after another."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "pytest", "torch.distributed", "rvdcomm.api"])
    ours, theirs = context.Pipe()
    process = context.Process(target=lane, args=(kills, theirs, tag_of(os.getpid())))
    process.start()
    theirs.close()
    try:
        outcomes: list[Outcome] = ours.recv()
        process.join(WORLD_SECS)
        return outcomes
    finally:
        ours.close()
        if process.is_alive():
            process.kill()
            process.join()


# --- in a lane ----------------------------------------------------------------------------------

NEW, READY, LOOPS, REPORTED = range(4)


class Board:
    """What the ranks of a world and their lane tell each other, in memory that they share."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)

    def reach(self, rank: int, phase: int) -> None:
        self.memory[rank] = phase

    def wait(self, phase: int, ranks: Sequence[int], timeout_secs: float = WORLD_SECS) -> bool:
        """Whether all ``ranks`` reached ``phase`` in time."""
        deadline = time.monotonic() + timeout_secs
        while any(self.memory[rank] < phase for rank in ranks):
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True

    def wait_for_port(self) -> int:
        """Where the store listens, as soon as it does."""
        while not (port := struct.unpack_from("I", self.memory, 64)[0]):
            time.sleep(1e-3)
        return int(port)

    def set_port(self, port: int) -> None:
        struct.pack_into("I", self.memory, 64, port)


def lane(kills: list[Kill], pipe: Connection, tag: str) -> None:
    """Run worlds; the store is in a process that outlives them, as it is in torchrun's agent."""
    torch.set_num_threads(1)
    # There may be other worlds on this machine.
    token_hex = secrets.token_hex
    secrets.token_hex = lambda num_bytes: f"{tag}{token_hex(num_bytes)}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    agent = Board()
    # Not in this process: the server is a thread.
    pid = fork(partial(serve_store, agent))
    port = agent.wait_for_port()
    try:
        with tempfile.TemporaryDirectory() as folder:
            pipe.send([run_world(kill, f"{folder}/{i}", port) for i, kill in enumerate(kills)])
    finally:
        # The child holds an end of the pipe; while it lives, the test would wait for ever.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def serve_store(agent: Board) -> None:
    """Be the process that outlives the worlds of a lane."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent.set_port(store.port)
    signal.pause()


def run_world(kill: Kill, name: str, port: int) -> Outcome:
    """Fork the ranks, kill one, and collect what the others report."""
    ranks = range(kill.num_ranks)
    for index in kill.calls:
        # Planned here, before the fork, it is known to all ranks.
        work_of(kill.num_ranks, index)[0].program_of(0)
    world = start_world(kill, name, port)
    outcome = Outcome(kill)
    world.board.wait(READY if kill.is_compiling else LOOPS, ranks)
    time.sleep(kill.delay_secs)
    os.kill(world.pids[kill.victim], signal.SIGKILL)
    killed_at = time.monotonic()
    wait_for_ends(world.pids, outcome)
    for rank, report in enumerate(world.reports):
        if text := report.read():
            error, secs = json.loads(text)
            outcome.errors[rank] = error, secs - killed_at
        report.close()
    return outcome


@dataclass(frozen=True)
class Started:
    """The processes of a world, and the ends of their pipes."""

    board: Board
    pids: list[int]
    reports: list[Any]


def start_world(kill: Kill, name: str, port: int) -> Started:
    """Fork the ranks until all of them have joined.

    A connection to the store takes seconds now and then, where a name server does not answer.
    """
    ranks = range(kill.num_ranks)
    for attempt in range(3):
        board, pipes = Board(), [os.pipe() for _ in ranks]
        board.set_port(0 if kill.serves_store else port)
        join = partial(store_of, kill, f"{name}.{attempt}", board)
        pids = [fork(partial(live, kill, rank, join, board, pipes[rank][1])) for rank in ranks]
        for _, theirs in pipes:
            os.close(theirs)
        world = Started(board, pids, [os.fdopen(ours) for ours, _ in pipes])
        if board.wait(READY, ranks, START_SECS):
            return world
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    raise TimeoutError(f"{kill}: the ranks cannot join")


def fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def wait_for_ends(pids: Sequence[int], outcome: Outcome) -> None:
    """Wait for all ranks, and end those that would not."""
    deadline = time.monotonic() + WORLD_SECS
    running = dict(enumerate(pids))
    while running:
        for rank, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                outcome.statuses[rank] = status
                del running[rank]
            elif time.monotonic() > deadline:
                outcome.hung.append(rank)
                os.kill(pid, signal.SIGKILL)
        time.sleep(2e-3)


# --- on the ranks -------------------------------------------------------------------------------


@cache
def work_of(num_ranks: int, index: int) -> tuple[rv.Plan, dict[int, Tensor], dict[int, Tensor]]:
    """A transition: its plan, and what every rank passes to a call and gets from it."""
    shape, src_text, dst_text = TRANSITIONS[num_ranks][index]
    src, dst = rv.Layout(shape, src_text), rv.Layout(shape, dst_text)
    given = {rank: shard_of(rank, src) for rank in range(num_ranks)}
    whole = torch.from_numpy(np.sum(parts_of(src, "float32", 0), axis=0, dtype="float32"))
    box = rv.Layout(shape, "R(1)V(1)D(1,1)").cell(0).box
    wanted = {rank: whole[dst.cell(rank).box.slices_within(box)] for rank in range(num_ranks)}
    return rv.plan(src, dst), given, wanted


def store_of(kill: Kill, name: str, board: Board, rank: int) -> Any:
    """The store that this rank is to use."""
    if not kill.is_compiling:
        return dist.FileStore(name, kill.num_ranks)
    is_server = kill.serves_store and rank == 0
    port = 0 if is_server else board.wait_for_port()
    store = dist.TCPStore("127.0.0.1", port, None, is_server, wait_for_workers=False)
    if is_server:
        board.set_port(store.port)
    return dist.PrefixStore(name, store)


def live(kill: Kill, rank: int, join: Callable[[int], Any], board: Board, report: int) -> None:
    """Make calls until one fails, and report what it raised."""
    store = join(rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=kill.num_ranks)
    # A connection to the store may take seconds, so it is made before the short timeout is set.
    assert World.of().store is not None
    World.of().group_timeout = timedelta(seconds=kill.timeout_secs)
    board.reach(rank, READY)
    board.wait(READY, range(kill.num_ranks))
    error = error_of(partial(call_for_ever, kill, rank, board))
    os.write(report, json.dumps([error, time.monotonic()]).encode())
    board.reach(rank, REPORTED)
    if kill.serves_store and rank == 0:
        # The others ask the store which ranks are missing, so rank 0 has to outlive them.
        board.wait(REPORTED, [r for r in range(kill.num_ranks) if r != kill.victim])
    World.of().close()
    dist.destroy_process_group()


def call_for_ever(kill: Kill, rank: int, board: Board) -> None:
    work = [work_of(kill.num_ranks, index) for index in kill.calls]
    calls = [rv.Redistributor(plan, executor="peer") for plan, _, _ in work]
    outs = [torch.empty_like(wanted[rank]) for _, _, wanted in work]
    board.reach(rank, LOOPS)
    while True:
        for call, out, (_, given, wanted) in zip(calls, outs, work, strict=True):
            call(given[rank], out=out)
            assert torch.equal(out, wanted[rank])


# --- ranks that give up -------------------------------------------------------------------------

NUM_RANKS = 4
HURRY_SECS = 2.0
SRC = rv.Layout((9, 10), "R(1)V(2)D(2,1)")
DST = rv.Layout((9, 10), "R(1)V(1)D(1,4)")


def timed(call: Callable[[], Any]) -> tuple[str, float]:
    """The error of a call, and how long it took."""
    start = time.monotonic()
    error = error_of(call)
    return error, time.monotonic() - start


def check_anew(rank: int) -> None:
    """Check a call in a new group, where nothing is compiled yet."""
    group = dist.new_group(list(range(NUM_RANKS)))
    call = rv.Redistributor(rv.plan(SRC, DST), group, executor="peer")
    assert_moved(call(shard_of(rank, SRC, 1)), SRC, DST, 1)


@pytest.mark.parametrize("victim", [0, 2])
@on_ranks(NUM_RANKS, is_last=True)
def test_an_interrupted_rank_is_named_and_a_new_group_works(rank: int, victim: int) -> None:
    """One rank is interrupted while it waits for the others, who then call."""
    call, shard = rv.Redistributor(rv.plan(SRC, DST), executor="peer"), shard_of(rank, SRC)
    call(shard)
    dist.barrier()
    if rank == victim:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with suppress(KeyboardInterrupt):
            call(shard)
            call(shard)
    else:
        time.sleep(0.6)
        error, secs = timed(lambda: [call(shard) for _ in range(3)])
        named = f"a peer step on ranks (0:4), rank {rank}: rank {victim} gave up; its own"
        assert error.startswith(f"CommError: {named}")
        assert secs < SOON_SECS
    check_anew(rank)


@on_ranks(NUM_RANKS, HURRY_SECS, is_last=True)
def test_rank_whose_call_is_rejected_is_named_as_late_by_the_others(rank: int) -> None:
    """One rank passes a shard of the wrong shape in a later call, and makes no other."""
    call, shard = rv.Redistributor(rv.plan(SRC, DST), executor="peer"), shard_of(rank, SRC)
    call(shard)
    error, secs = timed(lambda: call(torch.zeros(3, 3) if rank == 0 else shard))
    if rank == 0:
        time.sleep(HURRY_SECS)
        assert error.startswith("ShapeMismatchError: redistribute R(1)V(2)D(2,1) ->")
    else:
        assert "rank 0 did not arrive within 2 s" in error
        assert secs < HURRY_SECS + SOON_SECS
    dist.barrier()
    check_anew(rank)


# --- after a death ------------------------------------------------------------------------------

FEWER = rv.Layout((9, 10), "R(1)V(3)D(1,1)"), rv.Layout((9, 10), "R(1)V(1)D(1,3)")


def die_and_go_on(rank: int, victim: int, folder: Path) -> None:
    """The survivors form a new world of their own, with a store of its own."""
    call, shard = rv.Redistributor(rv.plan(SRC, DST), executor="peer"), shard_of(rank, SRC)
    call(shard)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    error, secs = timed(lambda: [call(shard) for _ in range(3)])
    assert f"rank {victim} died" in error
    assert secs < SOON_SECS
    dist.destroy_process_group()
    left = [r for r in range(NUM_RANKS) if r != victim].index(rank)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS - 1)
    dist.init_process_group("gloo", store=store, rank=left, world_size=NUM_RANKS - 1)
    again = rv.Redistributor(rv.plan(*FEWER), executor="peer")
    assert_moved(again(shard_of(left, FEWER[0], seed=2)), *FEWER, seed=2)


@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_of_a_death_can_form_a_new_world(
    worlds: Worlds, victim: int, tmp_path: Path
) -> None:
    worlds(NUM_RANKS).run(die_and_go_on, victim, tmp_path, dying=[victim])
