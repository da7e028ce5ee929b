"""Rendezvous: find out which ranks are on one machine, and join each two of them by a socket.

Abstract unix sockets belong to a network namespace of one kernel, so a connection is the proof that
two ranks are on one machine. Host names are not asked: containers and emulated hosts share them.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import time
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rvdcomm.run.agree import exchange_posts, read_post
from rvdcomm.run.world import World

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 1 << 16


class Listener:
    """A socket to which ranks of this machine can connect; it appears in no file system.

    Its name can be seen by other programs, its key cannot: only ranks of the job learn it.
    """

    def __init__(self, backlog: int) -> None:
        self.name = f"rvdcomm-{secrets.token_hex(16)}"
        self.key = secrets.token_hex(16)
        self.socket = unix_socket()
        try:
            self.socket.bind(f"\0{self.name}")
            # All may connect before the first is accepted, so nobody has to do two things at once.
            self.socket.listen(backlog)
        except OSError:
            self.socket.close()
            raise

    @property
    def post(self) -> Message:
        """What other ranks need to connect, and to prove that they are ranks."""
        return {"name": self.name, "key": self.key}

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def unix_socket() -> socket.socket:
    """A socket that keeps messages apart and tells at once when the other end is gone."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# --- islands ------------------------------------------------------------------------------------


def islands(
    world: World, members: Sequence[int], groups: Iterable[Collection[int]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Split ``members`` into sets of ranks that can reach each other on one machine.

    Collective over ``members``. All ranks get the same answer: ascending, each rank in one island,
    those that reach nobody alone.

    Args:
        world: the group in which ranks are numbered.
        members: the ranks that ask.
        groups: ranks of different groups are kept apart even if they are on one machine; a rank
            in none stays alone. None: all may be together.

    Raises:
        CommError: some members did not join within the group's timeout; names them.
    """
    members = tuple(sorted(members))
    what = "finding ranks of one machine"
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(Listener(len(members)))
            name = listener.name
        except OSError:
            name = ""
        posts = exchange_posts(world, members, {"name": name}, what)
        near = _together(world.rank, members, groups)
        reached = [rank for rank in near if name and _can_reach(posts[rank]["name"])]
        posts = exchange_posts(world, members, {"reached": reached}, what)
    return partition({rank: frozenset(post["reached"]) for rank, post in posts.items()})


def partition(reached: dict[int, frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks of which each two reach each other, by whom each rank reached.

    Where reaching is not transitive a rank joins the first set that takes it.

    >>> partition({0: frozenset({2}), 1: frozenset({2}), 2: frozenset({0, 1})})
    ((0, 2), (1,))
    """
    found: list[list[int]] = []
    for rank in sorted(reached):
        for island in found:
            if all(rank in reached[other] and other in reached[rank] for other in island):
                island.append(rank)
                break
        else:
            found.append([rank])
    return tuple(map(tuple, found))


def _together(
    rank: int, members: Sequence[int], groups: Iterable[Collection[int]] | None
) -> list[int]:
    """The other members that may be in one island with ``rank``."""
    groups = [members] if groups is None else groups
    own = next((group for group in groups if rank in group), ())
    return [member for member in members if member in own and member != rank]


def _can_reach(name: str) -> bool:
    if not name:
        return False
    with unix_socket() as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0{name}")
        except BlockingIOError:
            return True  # More ranks ask than the system lets wait, so somebody is there.
        except OSError:
            return False
    return True


# --- links --------------------------------------------------------------------------------------


class Link:
    """The socket between this rank and one other.

    While both processes live it is open: its end is how a death is seen, at once, whatever the
    process died of and across namespaces of process ids.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Hand over a message, which is kept until the other rank asks for it.

        Raises:
            OSError: the other process ended, or closed the link.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self.socket.sendmsg([json.dumps(message).encode()], rights, socket.MSG_NOSIGNAL)

    def receive(self, timeout_secs: float, max_fds: int = 0) -> tuple[Message, list[int]]:
        """The next message, and the file descriptors that came with it.

        Raises:
            EOFError: the other process ended, or closed the link.
            TimeoutError: no message came in time.
            OSError: any other failure; also if this process can take no more descriptors.
        """
        self.socket.settimeout(max(timeout_secs, 1e-3))
        # Not socket.recv_fds, which drops the flag: a descriptor must not outlive an exec.
        room = socket.CMSG_SPACE(max_fds * array("i").itemsize) if max_fds else 0
        data, extra, flags, _ = self.socket.recvmsg(
            MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
        )
        fds = array("i")
        for _, _, rights in extra:
            fds.frombytes(rights)
        if not data:
            raise EOFError("the other process ended")
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            return read_post(data), list(fds)
        except ValueError:
            for fd in fds:
                os.close(fd)
            raise

    def is_hung_up(self) -> bool:
        """Whether the other process ended, or closed the link."""
        poller = select.poll()
        poller.register(self.socket, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Hang up, on our side alone: a forked child does so without disturbing its parent."""
        self.socket.close()

    def __del__(self) -> None:
        # A group that is dropped hangs up like one that is closed.
        self.close()


def meet(
    rank: int, listener: Listener, posts: Mapping[int, Message], fd: int, timeout_secs: float
) -> dict[int, tuple[Link, int]]:
    """A link to every other rank of ``posts``, and the file descriptor that this rank handed over.

    Collective over the ranks of ``posts``. A rank connects to all lower ones, which never waits,
    and then accepts the higher ones.

    Args:
        rank: this rank.
        listener: this rank's.
        posts: ``Listener.post`` of every rank.
        fd: the descriptor that all others get.
        timeout_secs: for all of it.

    Raises:
        TimeoutError, ConnectionError: another rank is late or gave up.
        OSError: the system refused this rank something.
    """
    deadline = time.monotonic() + timeout_secs
    lower = [peer for peer in posts if peer < rank]
    try:
        with ExitStack() as undo:
            met: dict[int, tuple[Link, int]] = {}
            links = {peer: _dial(rank, peer, posts[peer], [fd], undo) for peer in lower}
            while missing := [peer for peer in posts if peer > rank and peer not in met]:
                try:
                    peer, link, their_fd = _accept(listener, deadline, undo)
                except TimeoutError:
                    raise TimeoutError(f"ranks {missing} did not connect") from None
                link.send({}, [fd])
                met[peer] = link, their_fd
            for peer, link in links.items():
                try:
                    _, fds = link.receive(deadline - time.monotonic(), 1)
                except EOFError:
                    raise ConnectionResetError(f"rank {peer} gave up") from None
                undo.callback(os.close, fds[0])
                met[peer] = link, fds[0]
            undo.pop_all()
    except OSError:
        # Nobody need wait for this rank until the time is over, neither those that have connected
        # nor those to which it would.
        listener.socket.close()
        for peer in lower:
            with suppress(OSError), ExitStack() as undo:
                _dial(rank, peer, posts[peer], [], undo)
        raise
    return met


def _dial(rank: int, peer: int, post: Message, fds: Sequence[int], undo: ExitStack) -> Link:
    """Connect to ``peer``, which wrote ``post``; without a descriptor this says "I give up"."""
    link = Link(undo.enter_context(unix_socket()))
    try:
        link.socket.connect(f"\0{post['name']}")
    except ConnectionRefusedError:
        raise ConnectionRefusedError(f"rank {peer} is gone") from None
    link.send({"rank": rank, "key": post["key"]}, fds)
    return link


def _accept(listener: Listener, deadline: float, undo: ExitStack) -> tuple[int, Link, int]:
    """The next rank that connects: its number, link and descriptor. Strangers are sent away."""
    while True:
        listener.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        with ExitStack() as stranger:
            link = Link(stranger.enter_context(listener.socket.accept()[0]))
            try:
                hello, fds = link.receive(deadline - time.monotonic(), 1)
            except (EOFError, ValueError):
                continue
            for fd in fds:
                stranger.callback(os.close, fd)
            if hello.get("key") != listener.key:
                continue
            if not fds:
                raise ConnectionResetError(f"rank {hello['rank']} gave up")
            undo.push(stranger.pop_all())
            return hello["rank"], link, fds[0]
