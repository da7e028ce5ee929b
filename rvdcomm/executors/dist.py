"""Dist: the collectives of one rank on torch.distributed, whichever backend serves it.

They move bytes, so that every dtype torch can hold is moved exactly. They are started and finished
apart from each other: what a program lets a rank do in between overlaps with the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from rvdcomm.errors import CommError
from rvdcomm.executors.call import Call
from rvdcomm.executors.local import call_offset
from rvdcomm.executors.world import World
from rvdcomm.layout import ranges_text
from rvdcomm.program import NO_BUFFER, Collective, Entry, Program


class Transfer:
    """One collective, compiled for this rank; making it is collective over its group.

    ``tag`` tells apart transfers that are under way at once; equal on all ranks of the group.
    """

    def __init__(self, program: Program, collective: Collective, world: World, tag: int) -> None:
        self.program, self.collective, self.rank = program, collective, world.rank
        self._group = world.subgroup(collective.ranks)
        self._tag = tag
        i = collective.ranks.index(world.rank)
        compilers = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
        }
        self._call, self.sent_bytes = compilers[collective.kind](
            collective.src[i], collective.dst[i]
        )
        ranks = ranges_text(collective.ranks)
        self._what = f"{world.backend} {collective.kind} on group ({ranks}), rank {world.rank}"

    def start(self, call: Call) -> None:
        """Hand it to the backend; what it reads and writes must be left alone until it is done."""
        try:
            call.works[self._tag] = self._call(call)
        except RuntimeError as error:
            raise CommError(f"{self._what}: {error}") from None
        call.sent_bytes += self.sent_bytes

    def finish(self, call: Call) -> None:
        """Wait until it is done."""
        try:
            for work in call.works.pop(self._tag):
                work.wait()
        except RuntimeError as error:
            raise CommError(f"{self._what}: {error}") from None

    # --- kinds ----------------------------------------------------------------------------------

    def _entries(self, rank: int, peer: int) -> tuple[Entry, ...]:
        message = self.collective.by_pair.get((rank, peer))
        return () if message is None else message.entries

    def _run(self, name: str, entries: Iterable[Entry], side: str) -> Callable[[Call], Tensor]:
        """The contiguous run that holds these entries, as bytes."""
        entries = list(entries)
        if name == NO_BUFFER or not entries:
            return lambda call: call.arena[:0]
        buffer = self.program.buffer[name, self.rank]
        first, piece = entries[0].box, getattr(entries[0], side)
        inner = first.flat_offset_within(buffer.pieces[piece])
        assert inner is not None, "verify() proves that entries are contiguous"
        item = self.program.item_bytes
        start = call_offset(self.program, self.rank, name) + buffer.offset(piece) + inner
        count = sum(entry.box.num_elements for entry in entries)
        return lambda call: call.bytes(name).narrow(0, start * item, count * item)

    def _all_to_all(self, src: str, dst: str) -> tuple[Callable[[Call], list[Any]], int]:
        ranks, item = self.collective.ranks, self.program.item_bytes
        sent = [self._entries(self.rank, peer) for peer in ranks]
        received = [self._entries(peer, self.rank) for peer in ranks]
        src_run = self._run(src, (e for entries in sent for e in entries), "src_piece")
        dst_run = self._run(dst, (e for entries in received for e in entries), "dst_piece")
        src_splits = [item * sum(e.box.num_elements for e in entries) for entries in sent]
        dst_splits = [item * sum(e.box.num_elements for e in entries) for entries in received]

        def call_backend(call: Call) -> list[Any]:
            return self._group.all_to_all(
                dst_run(call), src_run(call), dst_splits, src_splits, self._tag
            )

        return call_backend, sum(src_splits) - src_splits[ranks.index(self.rank)]

    def _all_gather(self, src: str, dst: str) -> tuple[Callable[[Call], list[Any]], int]:
        ranks = self.collective.ranks
        sent = self._entries(self.rank, ranks[0])
        src_run = self._run(src, sent, "src_piece")
        dst_run = self._run(
            dst, (e for peer in ranks for e in self._entries(peer, self.rank)), "dst_piece"
        )

        def call_backend(call: Call) -> list[Any]:
            return self._group.all_gather(dst_run(call), src_run(call), self._tag)

        num_elements = sum(e.box.num_elements for e in sent)
        return call_backend, num_elements * self.program.item_bytes * (len(ranks) - 1)

    def _all_reduce(self, _: str, dst: str) -> tuple[Callable[[Call], list[Any]], int]:
        dst_run = self._run(dst, self._entries(self.rank, self.rank), "dst_piece")

        def call_backend(call: Call) -> list[Any]:
            return self._group.all_reduce(dst_run(call).view(call.dtype))

        sent = sum(n for (a, _), n in self.collective.traffic().items() if a == self.rank)
        return call_backend, sent * self.program.item_bytes
