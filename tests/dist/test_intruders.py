"""Other programs connect to the sockets of the ranks: first calls may be slow, but succeed."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm import native
from rvdcomm.run.shared_memory import rendezvous
from rvdcomm.run.shared_memory.rendezvous import Listener, meet, unix_socket
from tests.dist.on_ranks import assert_moved
from tests.dist.shards import shard_of
from tests.dist.world import Worlds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

NUM_RANKS = 4
NUM_CALLS = 3
TIMEOUT_SECS = 10.0
NOBODY = 65534
LIES = b"\xff{not json", json.dumps({"rank": 1, "key": "?"}).encode()
SRC, DST = rv.Layout((54, 35), "R(1)V(4)D(1,1)"), rv.Layout((54, 35), "R(4)V(1)D(1,1)")

# --- the intruder -------------------------------------------------------------------------------


def names() -> set[str]:
    """The ranks' sockets, as every program sees them."""
    words = Path("/proc/net/unix").read_text().split()
    return {word.removeprefix("@") for word in words if word.startswith("@rvdcomm-")}


def connected(name: str) -> socket.socket | None:
    sock = unix_socket()
    sock.setblocking(False)
    try:
        sock.connect(f"\0{name}")
    except OSError:
        sock.close()
        return None
    return sock


def intrude(how: str, pipe: Connection) -> None:
    """Connect to every socket of a rank as soon as it is there, until killed."""
    held: list[socket.socket] = []
    if how == "another user":
        os.setuid(NOBODY)
    pipe.send("ready")
    while True:
        for name in names():
            for _ in range(200 if how == "flood" else 3):
                sock = connected(name)
                if sock is None:
                    continue
                with suppress(OSError):
                    if how == "lies":
                        sock.send(LIES[len(held) % 2])
                held.append(sock)
        while len(held) > 400 or (held and how == "hang up"):
            held.pop(0).close()


@contextmanager
def intruder(how: str) -> Iterator[None]:
    """Run a process that connects to the sockets of the ranks during the block."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("forkserver").Process(target=intrude, args=(how, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(30.0)
        assert ours.recv() == "ready"
        yield
    finally:
        process.kill()
        process.join()


# --- calls among intruders ----------------------------------------------------------------------


def first_calls(rank: int) -> None:
    """The first calls of new groups, whose ranks have to meet."""
    for seed in range(NUM_CALLS):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECS))
        shard = shard_of(rank, SRC, seed)
        found = rv.redistribute(shard, SRC, DST, group=group, executor="peer")
        assert_moved(found, SRC, DST, seed)
        dist.destroy_process_group(group)


@pytest.mark.parametrize("how", ["flood", "lies", "hang up", "another user"])
def test_first_calls_succeed_while_another_program_connects(worlds: Worlds, how: str) -> None:
    if how == "another user" and os.geteuid() != 0:
        pytest.skip("needs the right to become another user (root)")
    world = worlds(NUM_RANKS)
    with intruder(how):
        world.run(first_calls)


# --- one rank's reception -----------------------------------------------------------------------


def as_nobody(function: Any) -> int:
    """The exit status of a child of another user; 0 if ``function`` returns true there."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setuid(NOBODY)
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")


@needs_root
def test_another_user_who_knows_the_key_gets_no_descriptor() -> None:
    with Listener(2) as listener, open(os.devnull) as secret:

        def steal() -> bool:
            with unix_socket() as sock:
                sock.connect(f"\0{listener.name}")
                with suppress(OSError):
                    hello = json.dumps({"rank": 1, "key": listener.key}).encode()
                    socket.send_fds(sock, [hello], [0])
                sock.settimeout(5.0)
                try:
                    return socket.recv_fds(sock, 100, 1)[1] == []
                except ConnectionError:
                    return True

        errors: list[BaseException] = []

        def receive() -> None:
            try:
                meet(0, listener, {0: {}, 1: {}}, secret.fileno(), 1.0)
            except TimeoutError as error:
                errors.append(error)

        thread = threading.Thread(target=receive)
        thread.start()
        assert as_nobody(steal) == 0
        thread.join()
        assert [str(error) for error in errors] == ["ranks [1] did not connect"]


@needs_root
def test_a_rank_hands_no_descriptor_to_a_listener_of_another_user() -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        with Listener(2) as listener:
            os.write(theirs, listener.name.encode())
            listener.socket.settimeout(10.0)
            sock, _ = listener.socket.accept()
            os._exit(1 if socket.recv_fds(sock, 100, 1)[1] else 0)
    name = os.read(ours, 100).decode()
    post = {"name": name, "key": "known"}
    assert not rendezvous._can_reach("rvdcomm-nobody-listens-here")
    with (
        Listener(2) as listener,
        pytest.raises(ConnectionRefusedError, match="the socket of rank 0 is another user's"),
    ):
        meet(1, listener, {0: post, 1: listener.post}, ours, 5.0)
    assert os.waitpid(child, 0)[1] == 0


def test_unidentified_connections_are_limited_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "IDENTIFY_SECS", 0.2)
    with Listener(2 * rendezvous.MAX_STRANGERS) as listener:
        held = [connected(listener.name) for _ in range(2 * rendezvous.MAX_STRANGERS)]
        before = len(os.listdir("/proc/self/fd"))
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not connect"):
            meet(0, listener, {0: {}, 1: {}}, 0, 1.0)
        assert time.monotonic() - start >= 1.0
        # The other ends see that their connections were closed.
        assert all(sock is not None and sock.recv(1) == b"" for sock in held)
        # The listener is closed by a rank that gives up.
        assert len(os.listdir("/proc/self/fd")) == before - 1
        for sock in held:
            assert sock is not None
            sock.close()
