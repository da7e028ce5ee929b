"""Shared-memory domains: ranks of one machine that map each other's memory.

The ranks of a domain signal to each other through this memory. Sharing is all or nothing: if the
system refuses something to one rank, all ranks of the domain raise the same error. The kernel
closes the wire (socket) of a rank that dies; all ranks that wait for that rank then raise an error
that names it.
"""

from __future__ import annotations

import mmap
import os
import select
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Literal, TypeVar

import torch

from rvdcomm import _C
from rvdcomm.errors import CommError
from rvdcomm.layout import ranges_text
from rvdcomm.run.agree import Post, check_equal, exchange_posts
from rvdcomm.run.pool import address_of, mapping_of, pool_here
from rvdcomm.run.shared_memory.rendezvous import Listener, SocketChannel, domains, meet
from rvdcomm.run.shared_memory.segment import (
    MemorySegment,
    SharedMemoryError,
    reason_of,
    whole_pages,
)
from rvdcomm.run.staging_memory import StagingMemory
from rvdcomm.run.world import World

__all__ = ["SharedDomain", "SharedMemoryError", "domains"]

_RESERVING = "reserving shared memory"

_Result = TypeVar("_Result")
Lost = tuple[Literal["dead", "timeout", "failed", "elsewhere"], int]
"""What happened to a lost rank, and its number."""


class SharedDomain:
    """A shared-memory domain: ranks of one machine that map each other's segments.

    There is one domain per set of ranks. ``signals`` numbers ranks by their index in ``ranks``.
    ``pools`` holds the pools of the other ranks, as mapped in this process. It is empty unless
    every rank of the domain maps the pools of all others. ``memory`` is the arenas as staging
    memory; it also holds the pools.
    """

    def __init__(
        self,
        world: World,
        ranks: tuple[int, ...],
        wires: Mapping[int, SocketChannel],
        segments: Mapping[int, MemorySegment],
        pools: Mapping[int, mmap.mmap],
    ) -> None:
        self._world, self.ranks, self.rank = world, ranks, world.rank
        self._wires = dict(wires)
        self._segments = dict(segments)
        self.pools = dict(pools)
        self._pool_addresses = {rank: address_of(pool) for rank, pool in pools.items()}
        lifelines = [wires[r].socket.fileno() if r != world.rank else -1 for r in ranks]
        headers = [segments[r].header for r in ranks]
        self.signals = _C.Signals(ranks.index(world.rank), headers, lifelines)
        self._ends = {wire.socket.fileno(): ranks.index(rank) for rank, wire in wires.items()}
        self._poller = select.poll()
        for end in self._ends:
            self._poller.register(end, select.POLLRDHUP)
        self.memory = self._mapped()
        _open_domains.add(self)
        world.domains.add(self)

    @classmethod
    def connect(cls, world: World, ranks: Sequence[int]) -> SharedDomain:
        """Share memory among ``ranks``, all from one set of ``domains()``; collective over them.

        Raises:
            SharedMemoryError: a rank cannot share memory; raised by all of them.
            CommError: a rank did not join within the group's timeout.
        """
        ranks = tuple(ranks)
        what = f"sharing memory on ranks ({ranges_text(ranks)})"
        timeout_secs = world.timeout.total_seconds()
        post: Post = {"refusal": "", "name": "", "key": ""}
        with ExitStack() as undo, ExitStack() as done:
            try:
                own = MemorySegment.create()
                undo.callback(own.close)
                listener = done.enter_context(Listener(len(ranks)))
                post |= listener.post
            except OSError as error:
                post["refusal"] = f"share memory: {reason_of(error)}"
            posts = exchange_posts(world, ranks, post, what)
            _raise_refusal(posts, what)

            pool = pool_here()
            fds = [own.fd] if pool is None or pool.fd < 0 else [own.fd, pool.fd]
            wires, segments = {}, {world.rank: own}
            pools: dict[int, mmap.mmap] = {}
            verdict: Post = {"refusal": "", "lost": "", "maps_pools": False}
            try:
                # Half of the timeout: if this fails, the others must still wait for the verdict.
                met = meet(world.rank, listener, posts, fds, timeout_secs / 2)
                for peer, (wire, theirs) in met.items():
                    undo.callback(wire.close)
                    undo.callback(os.close, theirs[0])
                    for fd in theirs[1:]:
                        done.callback(os.close, fd)
                    wires[peer] = wire
                for peer, (_, theirs) in met.items():
                    segments[peer] = MemorySegment(theirs[0])
                    mapped = mapping_of(theirs[1]) if theirs[1:] else None
                    if mapped is not None:
                        pools[peer] = mapped
                verdict["maps_pools"] = len(fds) > 1 and pools.keys() == met.keys()
            except (TimeoutError, ConnectionError) as error:
                verdict["lost"] = str(error)
            except OSError as error:
                verdict["refusal"] = f"share memory: {reason_of(error)}"
            posts = exchange_posts(world, ranks, verdict, what)
            _raise_refusal(posts, what)
            for rank, post in posts.items():
                if post["lost"]:
                    raise CommError(f"{what}: rank {rank} met not all: {post['lost']}.")
            if not all(post["maps_pools"] for post in posts.values()):
                pools.clear()
            domain = cls(world, ranks, wires, segments, pools)
            undo.pop_all()
        return domain

    # --- memory ---------------------------------------------------------------------------------

    def address(self, rank: int) -> int:
        """The address of the arena of ``rank`` in this process; 0 while it has no bytes.

        It is valid as long as the present ``memory`` is held.
        """
        return self._segments[rank].address

    def in_pool(self, rank: int, location: int) -> int:
        """The address here of a ``location`` (``Pool.location``) in the pool of another rank."""
        return self._pool_addresses[rank] + location - 1

    def arena(self, num_bytes: int) -> memoryview:
        """The first bytes of this rank's own arena; the view stays valid as long as it is held."""
        return self._segments[self.rank].arena(num_bytes)

    def num_bytes(self, rank: int) -> int:
        """Length of the arena of ``rank``."""
        return self._segments[rank].num_bytes

    def reserve(self, num_bytes: Mapping[int, int]) -> None:
        """Grow the arena of every rank to at least ``num_bytes[rank]``; its contents stay.

        Collective over the domain with equal arguments. If no arena has to grow, nothing is sent
        and no address changes. The addresses of arenas that grow change.

        Raises:
            SharedMemoryError: a rank cannot get that much; raised on all ranks, whose arenas are as
                before.
            CommError: a rank is dead, late, or asks for other sizes; the domain is broken.
        """
        wanted = {rank: whole_pages(num_bytes.get(rank, 0)) for rank in self.ranks}
        growth = {r: n for r, n in wanted.items() if n > self._segments[r].num_bytes}
        if not growth:
            return
        own = self._segments[self.rank]

        def allocate() -> None:
            if self.rank in growth:
                own.allocate(growth[self.rank])

        try:
            # First all ranks allocate, then all map, then all use the mappings. After a failure the
            # pages behind new mappings are gone, but no rank has touched these mappings yet.
            self._all_or_none(allocate, wanted)
            mappings = self._all_or_none(
                lambda: {rank: self._segments[rank].mapping(n) for rank, n in growth.items()},
                wanted,
            )
        except SharedMemoryError:
            own.release()
            raise
        for rank, mapping in mappings.items():
            self._segments[rank].use(mapping)
        self.memory = self._mapped()

    def _mapped(self) -> StagingMemory:
        """All arenas and pools, as they are mapped now."""
        arenas = [self._segments[rank].arena(self.num_bytes(rank)) for rank in self.ranks]
        own = arenas[self.ranks.index(self.rank)]
        return StagingMemory(
            torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8),
            [self.address(rank) for rank in self.ranks],
            held=[*arenas, *self.pools.values()],
        )

    def _all_or_none(self, action: Callable[[], _Result], wanted: dict[int, int]) -> _Result:
        """Run an action that the system may refuse; if it refuses one rank, all ranks raise."""
        refusal = ""
        try:
            result = action()
        except OSError as error:
            refusal = f"reserve {wanted[self.rank]} bytes: {reason_of(error)}"
        what = f"{_RESERVING} on ranks ({ranges_text(self.ranks)})"
        post = {"bytes": list(wanted.values()), "refusal": refusal}
        posts = exchange_posts(self._world, self.ranks, post, what)
        try:
            check_equal({r: {"bytes": post["bytes"]} for r, post in posts.items()}, what, CommError)
        except CommError as error:
            self._world.fail(error)
            raise
        _raise_refusal(posts, what)
        return result

    # --- failures -------------------------------------------------------------------------------

    def comm_error(self, error: _C.PeerError, what: str) -> CommError:
        """The error to raise for a lost peer; ``what`` names the step that needed the peer."""
        ranks = ranges_text(self.ranks)
        return CommError(f"{what} on ranks ({ranks}), rank {self.rank}: {self._reason(error)}.")

    def _reason(self, error: _C.PeerError) -> str:
        rank = self.ranks[error.rank]
        if error.kind == "dead":
            return f"rank {rank} died (its process ended, or it closed the group)"
        if error.kind == "timeout":
            return f"rank {rank} did not arrive within {self.timeout_secs:g} s"
        if error.kind == "elsewhere":
            return f"rank {rank} is in another call than a rank that waits for it"
        if rank == self.rank:
            return "this rank gave up in an earlier call, so the group is broken"
        return f"rank {rank} gave up; its own error says why"

    def watch(self, members: Iterable[int], what: str, is_done: Callable[[], bool]) -> None:
        """Raise a CommError if this domain failed, or a member is gone before ``is_done``.

        A rank that has left may already have done everything that this rank waits for.
        """
        try:
            self.signals.check()
            for rank in self.hung_up() & set(members):
                if not is_done():
                    self.signals.blame("dead", self.ranks.index(rank))
        except _C.PeerError as error:
            raise CommError(f"{what}, rank {self.rank}: {self._reason(error)}.") from None

    def hung_up(self) -> set[int]:
        """Ranks whose process ended, or that closed their domain."""
        return {rank for rank, wire in list(self._wires.items()) if wire.is_hung_up()}

    def check_all_began(self) -> None:
        """Raise a PeerError if a rank left before it began the present call.

        A rank that only sends waits for no other sender, so it would not notice.
        """
        for end, _ in self._poller.poll(0):
            # Raises if the rank is dead, and has not begun the call.
            self.signals.location(self._ends[end], self.timeout_secs)

    @property
    def timeout_secs(self) -> float:
        """How long a call waits for another rank."""
        return self._world.timeout.total_seconds()

    def lost(self) -> Lost | None:
        """The first failure of this domain, and the rank; None if nothing has failed."""
        try:
            self.signals.check()
        except _C.PeerError as error:
            return error.kind, self.ranks[error.rank]
        return None

    def fail(self, lost: Lost | None) -> None:
        """Break the domain because of a rank that another domain ``lost``, or because of this rank.

        So all domains of a group name the rank at fault, not the rank that first noticed it.
        """
        if lost is None or lost[1] not in self.ranks:
            self.signals.fail()
            return
        kind, rank = lost
        with suppress(_C.PeerError):
            self.signals.blame(kind, self.ranks.index(rank))

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Release wires and memory; the domain cannot be used any more.

        Memory that still has a view, or that a run holds, is released with its last reference. Not
        collective: the other ranks may finish work that needs nothing more from this rank. A forked
        child that closes its domain leaves the parent's domain as it is.
        """
        _open_domains.discard(self)
        self._world.domains.discard(self)
        # First: a run that finds no memory must find closed signals.
        self.signals.close()
        self.memory = StagingMemory.none(len(self.ranks))
        self._poller = select.poll()
        for wire in self._wires.values():
            wire.close()
        for segment in self._segments.values():
            segment.close()
        self._wires.clear()
        self._segments.clear()
        self.pools.clear()


def _raise_refusal(posts: Mapping[int, Post], what: str) -> None:
    """Raise for the first rank that the system refused something: on all ranks the same error."""
    for rank, post in posts.items():
        if post["refusal"]:
            raise SharedMemoryError(f"{what}: rank {rank} cannot {post['refusal']}")


_open_domains: weakref.WeakSet[SharedDomain] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child that kept the wires open would hide its parent's death from the other ranks.
    for domain in list(_open_domains):
        domain.close()


os.register_at_fork(after_in_child=_close_in_child)
