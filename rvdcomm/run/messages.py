"""Dist: the collectives of one rank, on the backend that torch.distributed uses for the group.

Bytes are moved as they are, so that every dtype that torch can hold is moved exactly. Starting and
finishing a collective are separate actions: the work between them overlaps with the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rvdcomm.errors import CommError
from rvdcomm.layout import ranges_text
from rvdcomm.program import NO_BUFFER, Collective, Entry, Program
from rvdcomm.run.call_memory import CallMemory
from rvdcomm.run.communicator import LANE_SHIFT, MAX_TAG
from rvdcomm.run.local import call_offset
from rvdcomm.run.world import World

ElementRun = tuple[str, int, int]
"""A contiguous run of memory: (buffer, first element in its block, number of elements)."""

Begin = Callable[[CallMemory], list[Any]]
"""Starts a collective; returns the work objects to wait for."""


class CompiledCollective:
    """One collective, compiled for this rank; construction is collective over its group.

    ``tag`` tells apart the collectives of one call and group; all ranks of the group use equal
    tags. Messages carry the sum of ``tag`` and ``CallMemory.tag``, so that ranks in different calls
    never pair.

    Messages of a posted call also carry a *lane*, the number of this collective in its group.
    So ranks may post different transitions in different orders. With NCCL, whose messages have no
    tags, a communicator of its own (``World.subgroup`` with ``identity``) takes the lane's role.
    """

    def __init__(
        self, program: Program, collective: Collective, world: World, tag: int, identity: int = 0
    ) -> None:
        self.program, self.collective, self.rank = program, collective, world.rank
        self._group = world.subgroup(collective.ranks, identity)
        self._tag, self._lane = tag, self._group.lane()
        i = collective.ranks.index(world.rank)
        begin, self.sent_bytes = self._compiled(collective.src[i], collective.dst[i])
        ranks = ranges_text(collective.ranks)
        what = f"{world.backend} {collective.kind} on group ({ranks}), rank {world.rank}"
        self._begin, self._what = begin, what

    def start(self, call: CallMemory) -> None:
        """Hand the collective to the backend, which owns the memory until ``finish`` returns."""
        try:
            call.works[id(self)] = self._begin(call)
        except RuntimeError as error:
            raise CommError(f"{self._what}: {error}") from None
        call.sent_bytes += self.sent_bytes

    def finish(self, call: CallMemory) -> None:
        """Wait until the collective is done."""
        try:
            for work in call.works.pop(id(self)):
                self._group.wait(work)
        except RuntimeError as error:
            raise CommError(f"{self._what}: {error}") from None

    # --- compiling ------------------------------------------------------------------------------

    def _compiled(self, src: str, dst: str) -> tuple[Begin, int]:
        """The function that starts the collective, and the bytes that it sends to other ranks."""
        ranks, item = self.collective.ranks, self.program.item_bytes
        if self.collective.kind == "all_reduce":
            sent = sum(n for (a, _), n in self.collective.traffic().items() if a == self.rank)
            return self._all_reduce(dst), sent * item
        sends = self._runs(src, [self._entries(self.rank, peer) for peer in ranks], "src_piece")
        recvs = self._runs(dst, [self._entries(peer, self.rank) for peer in ranks], "dst_piece")
        sent = sum(run[2] for peer, run in zip(ranks, sends, strict=True) if peer != self.rank)
        if self._group.sends_best:
            return self._swap(sends, recvs), sent * item
        if self.collective.kind == "all_gather":
            return self._all_gather(sends, recvs), sent * item
        return self._all_to_all(sends, recvs), sent * item

    def _entries(self, rank: int, peer: int) -> tuple[Entry, ...]:
        message = self.collective.by_pair.get((rank, peer))
        return () if message is None else message.entries

    def _runs(self, name: str, entries: Iterable[tuple[Entry, ...]], side: str) -> list[ElementRun]:
        """The memory of each message; ``verify`` proves that a message is one contiguous run."""
        if name == NO_BUFFER:
            return [(name, 0, 0) for _ in entries]
        buffer = self.program.buffer[name, self.rank]
        base = call_offset(self.program, self.rank, name)
        runs = []
        for message in entries:
            start = 0
            if message:
                piece = getattr(message[0], side)
                inner = message[0].box.flat_offset_within(buffer.pieces[piece])
                assert inner is not None, "verify() proves that entries are contiguous"
                start = base + buffer.offset(piece) + inner
            runs.append((name, start, sum(entry.box.num_elements for entry in message)))
        return runs

    # --- kinds ----------------------------------------------------------------------------------

    def _swap(self, sends: list[ElementRun], recvs: list[ElementRun]) -> Begin:
        """Receive from and send to all ranks that exchange data with this one, all at once.

        Receives are posted before any send, so that arriving data need no buffer of their own.
        Ranks that exchange nothing do not wait for each other.
        """
        group = self._group
        rank, size = self.collective.ranks.index(self.rank), len(sends)
        others = [(rank + i) % size for i in range(1, size)]
        incoming = [(recvs[i], i) for i in others if recvs[i][2]]
        outgoing = [(sends[i], i) for i in others if sends[i][2]]
        own = (recvs[rank], sends[rank]) if recvs[rank][2] else None

        def begin(call: CallMemory) -> list[Any]:
            number = self._number(call)
            works = [group.recv(call.run(*run), i, number) for run, i in incoming]
            works += [group.send(call.run(*run), i, number) for run, i in outgoing]
            if own is not None:
                call.run(*own[0]).copy_(call.run(*own[1]))
            return works

        return begin

    def _number(self, call: CallMemory) -> int:
        """The tag that tells the messages of this collective in this call from all others."""
        if not call.is_posted:
            return (call.tag + self._tag) & MAX_TAG
        count = (call.tag + self._tag) & ((1 << LANE_SHIFT) - 1)
        return MAX_TAG + 1 + (self._lane << LANE_SHIFT) + count

    def _all_gather(self, sends: list[ElementRun], recvs: list[ElementRun]) -> Begin:
        group, whole, own = self._group, _joined(recvs), sends[0]
        return lambda call: [group.all_gather(call.bytes(*whole), call.bytes(*own))]

    def _all_to_all(self, sends: list[ElementRun], recvs: list[ElementRun]) -> Begin:
        group, item = self._group, self.program.item_bytes
        src, dst = _joined(sends), _joined(recvs)
        src_splits, dst_splits = ([item * run[2] for run in runs] for runs in (sends, recvs))
        return lambda call: [
            group.all_to_all(call.bytes(*dst), call.bytes(*src), dst_splits, src_splits)
        ]

    def _all_reduce(self, dst: str) -> Begin:
        group = self._group
        (run,) = self._runs(dst, [self._entries(self.rank, self.rank)], "dst_piece")
        return lambda call: [group.all_reduce(call.run(*run))]


def _joined(runs: list[ElementRun]) -> ElementRun:
    """Runs that follow each other in one buffer, as one run."""
    filled = [run for run in runs if run[2]] or runs[:1]
    name, start, _ = filled[0]
    return name, start, sum(count for _, _, count in filled)
