"""Instructions: copies, zeros and collectives, the buffers they work on, and their text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from rvdcomm.layout import Box, ranges_text

NO_BUFFER = "-"
"""The buffer name of a rank that sends nothing, or receives nothing, in a collective."""

UNKNOWN_BUFFER, UNKNOWN_PIECE = "?", -1
"""Placeholders for buffers and pieces of other ranks in a program lowered for some ranks only."""

BufferKey = tuple[str, int]
"""(name, rank) of a buffer."""


@dataclass(frozen=True)
class Buffer:
    """A block of memory of one rank: ``pieces`` one after another, each in row-major order."""

    name: str
    rank: int
    pieces: tuple[Box, ...]

    @property
    def num_elements(self) -> int:
        """Elements of all pieces."""
        return self._bounds[-1]

    def offset(self, piece: int) -> int:
        """Element offset of a piece."""
        return self._bounds[piece]

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return tuple(accumulate((piece.num_elements for piece in self.pieces), initial=0))


class Entry(NamedTuple):
    """A box that goes from piece ``src_piece`` of one buffer to piece ``dst_piece`` of another."""

    box: Box
    src_piece: int
    dst_piece: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of boxes by ``rank`` from buffer ``src`` to ``dst``, or an addition (``op="add"``).

    ``src`` is a buffer of ``src_rank``. If that is another rank, the buffer is in memory that both
    ranks map, and the copy belongs to ``step``; for all other copies ``step`` is 0.
    """

    op: str
    rank: int
    src: str
    dst: str
    entries: tuple[Entry, ...]
    src_rank: int = -1
    step: int = 0

    def __post_init__(self) -> None:
        if self.src_rank < 0:
            object.__setattr__(self, "src_rank", self.rank)

    @property
    def is_remote(self) -> bool:
        """Whether the copy reads another rank's memory."""
        return self.src_rank != self.rank

    @property
    def num_elements(self) -> int:
        """Elements of all boxes."""
        return sum(entry.box.num_elements for entry in self.entries)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose memory the copy uses; the first one runs the copy."""
        return (self.rank, self.src_rank) if self.is_remote else (self.rank,)

    def buffers_of(self, rank: int) -> set[str]:
        """Names of the buffers of ``rank`` that the copy uses."""
        mine = {self.dst} if rank == self.rank else set()
        return mine | {self.src} if rank == self.src_rank else mine

    def lines(self) -> list[str]:
        """The text form; ``s1@3`` is buffer s1 of rank 3."""
        src = f"step {self.step} {self.src}@{self.src_rank}" if self.is_remote else self.src
        return [f"{self.op} rank {self.rank} {src} {self.dst}: {_entries_text(self.entries)}"]


@dataclass(frozen=True, slots=True)
class Zero:
    """A fill of boxes of ``rank``'s buffer ``dst`` with zeros; ``src_piece`` has no meaning."""

    rank: int
    dst: str
    entries: tuple[Entry, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that runs the instruction."""
        return (self.rank,)

    def buffers_of(self, rank: int) -> set[str]:
        """Names of the buffers of ``rank`` that are filled."""
        return {self.dst} if rank == self.rank else set()

    def lines(self) -> list[str]:
        """The text form."""
        return [f"zero rank {self.rank} {self.dst}: {_entries_text(self.entries)}"]


@dataclass(frozen=True, slots=True)
class Message:
    """The boxes that ``src_rank`` sends to ``dst_rank`` (maybe itself) in one collective."""

    src_rank: int
    dst_rank: int
    entries: tuple[Entry, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the message."""
        return sum(entry.box.num_elements for entry in self.entries)


@dataclass(frozen=True)
class Collective:
    """One call of the backend by every rank of ``ranks``.

    ``kind`` is the call: ``all_to_all`` (any sizes), ``all_gather`` (every rank sends the same data
    to all) or ``all_reduce`` (in place; its messages, from each rank to itself, name the memory).
    ``ranks`` ascend; ``src[i]`` and ``dst[i]`` are the buffers of ``ranks[i]``. ``step`` is the
    index of the path's step that the call belongs to.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    src: tuple[str, ...]
    dst: tuple[str, ...]
    messages: tuple[Message, ...]

    def buffers_of(self, rank: int) -> set[str]:
        """Names of the buffers of ``rank`` that the call uses."""
        i = bisect_left(self.ranks, rank)
        is_member = i < len(self.ranks) and self.ranks[i] == rank
        return {self.src[i], self.dst[i]} if is_member else set()

    def lines(self) -> list[str]:
        """The text form: a line for the call, then one for every message."""
        buffers = f"{','.join(self.src)} {','.join(self.dst)}"
        head = f"collective {self.kind} step {self.step} ranks {ranges_text(self.ranks)} {buffers}"
        return [head] + [
            f"  {m.src_rank}->{m.dst_rank}: {_entries_text(m.entries)}".rstrip()
            for m in self.messages
        ]

    @cached_property
    def by_pair(self) -> dict[tuple[int, int], Message]:
        """Messages by (src_rank, dst_rank)."""
        return {(m.src_rank, m.dst_rank): m for m in self.messages}

    def traffic(self) -> dict[tuple[int, int], int]:
        """Elements sent from one rank to another, by (src_rank, dst_rank).

        An all_reduce of n elements by k ranks counts as its lower bound: each rank receives its
        chunk of the n elements from every other rank, and sends its summed chunk to every other
        rank. Chunks differ by at most one element. What a backend really sends is not known.
        """
        if self.kind != "all_reduce":
            return {
                (m.src_rank, m.dst_rank): m.num_elements
                for m in self.messages
                if m.src_rank != m.dst_rank and m.entries
            }
        k, num_elements = len(self.ranks), self.messages[0].num_elements
        chunk = {r: num_elements // k + (i < num_elements % k) for i, r in enumerate(self.ranks)}
        return {(a, b): chunk[a] + chunk[b] for a in self.ranks for b in self.ranks if a != b}

    @property
    def rounds(self) -> int:
        """Sequential messages of the busiest rank."""
        if self.kind == "all_reduce":
            return 2 * (len(self.ranks) - 1)
        partners: dict[tuple[int, str], int] = {}
        for a, b in self.traffic():
            for end in ((a, "out"), (b, "in")):
                partners[end] = partners.get(end, 0) + 1
        return max(partners.values(), default=0)


Instruction = Copy | Zero | Collective


def _entries_text(entries: tuple[Entry, ...]) -> str:
    return " ".join(
        f"{e.box}@{_piece_text(e.src_piece)}>{_piece_text(e.dst_piece)}" for e in entries
    )


def _piece_text(piece: int) -> str:
    return UNKNOWN_BUFFER if piece == UNKNOWN_PIECE else str(piece)


def connected(pairs: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The connected components of pairs of ranks, each ascending, in the order of first ranks.

    >>> connected([(3, 1), (1, 5), (2, 4)])
    ((1, 3, 5), (2, 4))
    """
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        parent.setdefault(rank, rank)
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for first, *others in pairs:
        root(first)
        for other in others:
            a, b = root(first), root(other)
            parent[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for rank in sorted(parent):
        groups.setdefault(root(rank), []).append(rank)
    return tuple(map(tuple, groups.values()))
