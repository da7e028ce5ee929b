"""Rendezvous: find out which ranks are on one machine, and connect every two of them by a socket.

Abstract unix sockets belong to a network namespace of one kernel, so a connection is the proof that
two ranks are on one machine. Host names prove nothing: containers and emulated hosts share them.

Any program of the machine can connect to such a socket. Both ends of a connection therefore ask the
kernel for the other's user, and a rank identifies itself by a key that only the job's store has.
A connection of another user, or one that does not identify itself within ``IDENTIFY_SECS``, is
dropped, and no rank waits for it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import struct
import time
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

from rvdcomm.run.agree import Post, exchange_posts, read_post
from rvdcomm.run.world import World

MAX_MESSAGE_BYTES = 1 << 16
MAX_FDS = 2
"""Most descriptors that a rank hands over: of its segment, and of its pool if that is shared."""

IDENTIFY_SECS = 1.0
"""Seconds that a connection has to identify itself; a rank does that as soon as it connects."""

MAX_STRANGERS = 64
"""Open connections that have not identified themselves, at most; the oldest is dropped first."""


class Listener:
    """A socket to which ranks of this machine can connect; it appears in no file system.

    Other programs can see its name. They cannot see its key, which is only in the job's store.
    """

    def __init__(self, backlog: int) -> None:
        self.name = f"rvdcomm-{secrets.token_hex(16)}"
        self.key = secrets.token_hex(16)
        self.socket = unix_socket()
        try:
            self.socket.bind(f"\0{self.name}")
            # All ranks may connect before the first is accepted, so that no rank has to connect and
            # accept at the same time.
            self.socket.listen(backlog)
        except OSError:
            self.socket.close()
            raise

    @property
    def post(self) -> Post:
        """Name and key, which other ranks need to connect and to prove that they are ranks."""
        return {"name": self.name, "key": self.key}

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def unix_socket() -> socket.socket:
    """A socket that keeps message boundaries and shows at once that the other end is closed."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# --- domains ------------------------------------------------------------------------------------


def domains(
    world: World, members: Sequence[int], groups: Iterable[Collection[int]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Split ``members`` into sets of ranks that can reach each other on one machine.

    Collective over ``members``. All ranks get the same answer: ascending sets, with each rank in
    exactly one. A rank that reaches no other rank is a set of its own.

    Args:
        world: the group in which ranks are numbered.
        members: the ranks that make this call.
        groups: ranks of different groups are kept apart even if they are on one machine; a rank
            in no group stays alone. If None, all ranks may be together.

    Raises:
        CommError: some members did not join within the group's timeout; the error names them.
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
    """Split ranks into sets in which every two have ``reached`` each other.

    If reaching is not transitive, a rank joins the first set that it fits into.

    >>> partition({0: frozenset({2}), 1: frozenset({2}), 2: frozenset({0, 1})})
    ((0, 2), (1,))
    """
    found: list[list[int]] = []
    for rank in sorted(reached):
        for domain in found:
            if all(rank in reached[other] and other in reached[rank] for other in domain):
                domain.append(rank)
                break
        else:
            found.append([rank])
    return tuple(map(tuple, found))


def _together(
    rank: int, members: Sequence[int], groups: Iterable[Collection[int]] | None
) -> list[int]:
    """The other members that may be in one domain with ``rank``."""
    groups = [members] if groups is None else groups
    own = next((group for group in groups if rank in group), ())
    return [member for member in members if member in own and member != rank]


def _can_reach(name: str) -> bool:
    """Whether a process of the same user listens under this name."""
    if not name:
        return False
    with unix_socket() as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0{name}")
        except BlockingIOError:
            return True  # The queue of connections is full, so a process listens.
        except OSError:
            return False
        return is_same_user(probe)


def is_same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end ran as this process's user when it connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


# --- wires --------------------------------------------------------------------------------------


class SocketChannel:
    """The socket between this rank and one other.

    The socket is open as long as both processes live. If one dies, the kernel closes its end. The
    other process sees that at once, whatever the cause and across namespaces of process ids.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, message: Post, fds: Sequence[int] = ()) -> None:
        """Send a message, which the kernel keeps until the other rank receives it.

        Raises:
            OSError: the other process ended, or closed the wire.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self.socket.sendmsg([json.dumps(message).encode()], rights, socket.MSG_NOSIGNAL)

    def receive(self, timeout_secs: float, max_fds: int = 0) -> tuple[Post, list[int]]:
        """The next message, and the file descriptors that came with it.

        Raises:
            EOFError: the other process ended, or closed the wire.
            TimeoutError: no message came in time.
            OSError: any other failure; also if this process can take no more descriptors.
        """
        self.socket.settimeout(max(timeout_secs, 1e-3))
        # Not socket.recv_fds, which drops MSG_CMSG_CLOEXEC: an exec must close the descriptors.
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
            _close(fds)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            return read_post(data), list(fds)
        except ValueError:
            _close(fds)
            raise

    def is_hung_up(self) -> bool:
        """Whether the other process ended, or closed the wire."""
        poller = select.poll()
        poller.register(self.socket, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Close this end; if a forked child does so, the connection of its parent stays open."""
        self.socket.close()

    def __del__(self) -> None:
        # A group that is dropped closes its wires, like a group that is closed.
        self.close()


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def meet(
    rank: int,
    listener: Listener,
    posts: Mapping[int, Post],
    fds: Sequence[int],
    timeout_secs: float,
) -> dict[int, tuple[SocketChannel, list[int]]]:
    """A wire to every other rank of ``posts``, and the descriptors that the other rank handed over.

    Collective over the ranks of ``posts``. A rank connects to all lower ranks, and then accepts the
    higher ranks. Rank 0 accepts at once, then rank 1, and so on, so there is no circular wait.

    Args:
        rank: this rank.
        listener: the listener of this rank.
        posts: ``Listener.post`` of every rank.
        fds: the descriptors that all other ranks get, 1 to ``MAX_FDS``.
        timeout_secs: limit for the whole meeting.

    Raises:
        TimeoutError, ConnectionError: another rank is late, gave up, or runs as another user.
        OSError: the system refused this rank something.
    """
    deadline = time.monotonic() + timeout_secs
    lower = [peer for peer in posts if peer < rank]
    try:
        with ExitStack() as undo:
            met: dict[int, tuple[SocketChannel, list[int]]] = {}
            wires = {peer: _dial(rank, peer, posts[peer], fds, deadline, undo) for peer in lower}
            with _Reception(listener) as reception:
                while missing := [peer for peer in posts if peer > rank and peer not in met]:
                    try:
                        peer, wire, theirs = reception.next_rank(deadline, undo)
                    except TimeoutError:
                        raise TimeoutError(f"ranks {missing} did not connect") from None
                    wire.send({}, fds)
                    met[peer] = wire, theirs
            for peer, wire in wires.items():
                try:
                    _, theirs = wire.receive(deadline - time.monotonic(), MAX_FDS)
                except EOFError:
                    raise ConnectionResetError(f"rank {peer} gave up") from None
                undo.callback(_close, theirs)
                met[peer] = wire, theirs
            undo.pop_all()
    except OSError:
        # Tell all other ranks now, so that none waits for this one until its timeout: those that
        # connect here, by closing the listener, and the lower ones, by a connection that gives up.
        listener.socket.close()
        for peer in lower:
            with suppress(OSError), ExitStack() as undo:
                _dial(rank, peer, posts[peer], [], deadline, undo)
        raise
    return met


def _dial(
    rank: int, peer: int, post: Post, fds: Sequence[int], deadline: float, undo: ExitStack
) -> SocketChannel:
    """Connect to ``peer``, given its ``post``; without descriptors this says "I give up"."""
    wire = SocketChannel(undo.enter_context(unix_socket()))
    # Only a blocking connect waits if the queue of the listener is full.
    secs = max(deadline - time.monotonic(), 1e-3)
    limit = struct.pack("ll", int(secs), int(secs % 1 * 1e6))
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        wire.socket.connect(f"\0{post['name']}")
    except ConnectionRefusedError:
        raise ConnectionRefusedError(f"rank {peer} is gone") from None
    except BlockingIOError:
        raise TimeoutError(f"rank {peer} did not accept") from None
    if not is_same_user(wire.socket):
        raise ConnectionRefusedError(f"the socket of rank {peer} is another user's")
    wire.send({"rank": rank, "key": post["key"]}, fds)
    return wire


class _Reception:
    """Accepts connections, and finds the ranks among them.

    Invariant: at most ``MAX_STRANGERS`` connections that did not identify themselves are open, none
    of another user, and none for longer than ``IDENTIFY_SECS``.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        listener.socket.setblocking(False)
        # The oldest first, each with the deadline by which it must identify itself.
        self._strangers: dict[SocketChannel, float] = {}

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        for stranger in list(self._strangers):
            self._drop(stranger)

    def next_rank(self, deadline: float, undo: ExitStack) -> tuple[int, SocketChannel, list[int]]:
        """The next rank that connects: its number, wire and descriptors.

        Raises:
            TimeoutError: none came in time.
            ConnectionResetError: a rank gave up.
        """
        while (now := time.monotonic()) < deadline:
            for stranger in [wire for wire, until in self._strangers.items() if until < now]:
                self._drop(stranger)
            readable = self._readable(min([deadline, *self._strangers.values()]) - now)
            for stranger in [w for w in self._strangers if w.socket.fileno() in readable]:
                found = self._identified(stranger)
                if found is not None:
                    rank, fds = found
                    undo.callback(stranger.close)
                    undo.callback(_close, fds)
                    return rank, stranger, fds
            if self._listener.socket.fileno() in readable:
                self._accept()
        raise TimeoutError

    def _readable(self, secs: float) -> set[int]:
        poller = select.poll()
        for sock in (self._listener.socket, *(wire.socket for wire in self._strangers)):
            poller.register(sock, select.POLLIN)
        return {fd for fd, _ in poller.poll(max(0.0, secs) * 1e3 + 1)}

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        stranger = SocketChannel(sock)
        if not is_same_user(sock):
            stranger.close()
            return
        if len(self._strangers) == MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._strangers[stranger] = time.monotonic() + IDENTIFY_SECS

    def _identified(self, stranger: SocketChannel) -> tuple[int, list[int]] | None:
        """The rank and descriptors of a connection that sent data; if it is no rank, drop it."""
        try:
            hello, fds = stranger.receive(0.0, MAX_FDS)
        except (EOFError, ConnectionError, TimeoutError, ValueError):
            self._drop(stranger)
            return None
        if hello.get("key") != self._listener.key:
            _close(fds)
            self._drop(stranger)
            return None
        if not fds:
            raise ConnectionResetError(f"rank {hello['rank']} gave up")
        del self._strangers[stranger]
        return hello["rank"], fds

    def _drop(self, stranger: SocketChannel) -> None:
        del self._strangers[stranger]
        stranger.close()
