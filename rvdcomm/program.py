"""Program: a plan for machines: buffers, copies and collectives in one order for all ranks.

Invariants (``verify.py`` checks them all): a buffer is the concatenation of its pieces, each a
row-major box; what a rank sends in one collective is one contiguous run of one buffer, in the order
of the group's ranks, and so is what it receives; a collective's group is ascending, so that the
order in which a backend sorts ranks never matters; a copy from another rank's memory reads a
staging buffer, never a shard, which is private to its rank.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from rvdcomm.box import Box
from rvdcomm.dtypes import ITEM_BYTES, dtype_name
from rvdcomm.errors import ProgramError
from rvdcomm.layout import MAX_RANKS, Layout, parse_ranges, ranges_text
from rvdcomm.text import integer, quoted

SRC, DST = "src", "dst"
"""The buffers of the caller: a rank's shard under either layout; of tensor 2 of several, src2."""
ALIGN_BYTES = 64
"""Staging buffers start at multiples of a cache line, which every dtype and vector load allows."""
_T = TypeVar("_T")
NO_BUFFER = "-"
"""Named where a rank sends nothing, or receives nothing, in a collective."""


def shard_name(side: str, index: int, num_tensors: int) -> str:
    """The name of a caller's buffer.

    >>> shard_name("src", 0, 1), shard_name("dst", 2, 5)
    ('src', 'dst2')
    """
    return side if num_tensors == 1 else f"{side}{index}"


def is_src(name: str) -> bool:
    """Whether a buffer is a caller's shard that the program may only read."""
    return name.startswith(SRC)


def is_shard(name: str) -> bool:
    """Whether a buffer is a caller's; all others are staging."""
    return name.startswith((SRC, DST))


def shard_index(name: str) -> int:
    """Which of the tensors a caller's buffer is a shard of."""
    return int(name[len(SRC) :] or 0)


def lift(box: Box, index: int, num_dims: int) -> Box:
    """A box of tensor ``index`` as a box of all tensors of a program, which has ``num_dims`` dims.

    >>> str(lift(Box((1,), (3,)), 4, 3))
    '[4:5,1:3,0:1]'
    """
    rest = num_dims - 1 - len(box.lo)
    return Box((index, *box.lo, *(0,) * rest), (index + 1, *box.hi, *(1,) * rest))


@dataclass(frozen=True, slots=True)
class Transition:
    """One tensor of a program: the layouts that it has and gets, and its dtype under each."""

    src: Layout
    dst: Layout
    src_dtype: str
    dst_dtype: str

    def layout(self, name: str) -> Layout:
        """The layout of the buffer ``name``."""
        return self.src if is_src(name) else self.dst

    def dtype(self, name: str) -> str:
        """The dtype of the buffer ``name``."""
        return self.src_dtype if is_src(name) else self.dst_dtype

    def lines(self, dtype: str) -> list[str]:
        """The text form in a program of ``dtype``."""
        return [
            f"{side} {layout}" + (f" as {own}" if own != dtype else "")
            for side, layout, own in (
                (SRC, self.src, self.src_dtype),
                (DST, self.dst, self.dst_dtype),
            )
        ]


@dataclass(frozen=True)
class Buffer:
    """Memory of one rank: ``pieces`` one after another, each in row-major order."""

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


@dataclass(frozen=True, slots=True)
class Entry:
    """``box`` lies in piece ``src_piece`` of one buffer and goes to ``dst_piece`` of another."""

    box: Box
    src_piece: int
    dst_piece: int


@dataclass(frozen=True, slots=True)
class Copy:
    """``rank`` copies boxes from buffer ``src`` to buffer ``dst``, or adds them (``op="add"``).

    ``src`` is a buffer of ``src_rank``: of another rank, it is read where that rank wrote it, which
    takes memory that both can map.
    """

    op: str
    rank: int
    src: str
    dst: str
    entries: tuple[Entry, ...]
    src_rank: int = -1

    def __post_init__(self) -> None:
        if self.src_rank < 0:
            object.__setattr__(self, "src_rank", self.rank)

    @property
    def is_remote(self) -> bool:
        """Whether it reads another rank's memory."""
        return self.src_rank != self.rank

    @property
    def num_elements(self) -> int:
        """Elements of all boxes."""
        return sum(entry.box.num_elements for entry in self.entries)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose memory it uses; the first one runs it."""
        return (self.rank, self.src_rank) if self.is_remote else (self.rank,)

    def buffers_of(self, rank: int) -> set[str]:
        """Names of the buffers of ``rank`` that are used here."""
        mine = {self.dst} if rank == self.rank else set()
        return mine | {self.src} if rank == self.src_rank else mine

    def lines(self) -> list[str]:
        """The text form; ``s1@3`` is buffer s1 of rank 3."""
        src = f"{self.src}@{self.src_rank}" if self.is_remote else self.src
        return [f"{self.op} rank {self.rank} {src} {self.dst}: {_entries_text(self.entries)}"]


@dataclass(frozen=True, slots=True)
class Zero:
    """``rank`` fills boxes of buffer ``dst`` with zeros (``src_piece`` means nothing)."""

    rank: int
    dst: str
    entries: tuple[Entry, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part."""
        return (self.rank,)

    def buffers_of(self, rank: int) -> set[str]:
        """Names of the buffers that ``rank`` uses here."""
        return {self.dst} if rank == self.rank else set()

    def lines(self) -> list[str]:
        """The text form."""
        return [f"zero rank {self.rank} {self.dst}: {_entries_text(self.entries)}"]


@dataclass(frozen=True, slots=True)
class Message:
    """What ``src_rank`` sends to ``dst_rank`` (maybe itself) in one collective."""

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

    ``kind`` is the call: ``all_to_all`` (any sizes), ``all_gather`` (every rank sends the same to
    all) or ``all_reduce`` (in place; its messages, from each rank to itself, name the memory).
    ``src[i]``, ``dst[i]`` are the buffers of ``ranks[i]``. ``step`` is the step it belongs to.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    src: tuple[str, ...]
    dst: tuple[str, ...]
    messages: tuple[Message, ...]

    def buffers_of(self, rank: int) -> set[str]:
        """Names of the buffers that ``rank`` uses here."""
        at = [i for i, member in enumerate(self.ranks) if member == rank]
        return {name for i in at for name in (self.src[i], self.dst[i])}

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
        """Elements from rank to other rank.

        An all_reduce of n elements by k ranks counts as its lower bound: each rank is sent its
        chunk of every other's n elements, and sends its summed chunk to every other. Chunks are at
        most one element uneven. (What a backend does inside is not seen from here.)
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
        """Messages one after another on the busiest rank."""
        if self.kind == "all_reduce":
            return 2 * (len(self.ranks) - 1)
        partners: dict[tuple[int, str], int] = {}
        for a, b in self.traffic():
            for end in ((a, "out"), (b, "in")):
                partners[end] = partners.get(end, 0) + 1
        return max(partners.values(), default=0)


Instruction = Copy | Zero | Collective


@dataclass(frozen=True, slots=True)
class Arena:
    """One block of memory for all staging buffers of a rank: byte offsets by buffer name."""

    offsets: dict[str, int]
    num_bytes: int


@dataclass(frozen=True)
class Program:
    """Instructions of all ranks, in one global order; ``str`` and ``parse`` are inverses.

    Staging, and all that is sent, is of ``dtype``; a copy from or to a shard of another dtype
    converts. Boxes are of the tensor; in a program of several tensors the first dim of every box
    says which tensor it is of (``lift``), so that boxes of two tensors never meet.
    """

    transitions: tuple[Transition, ...]
    dtype: str
    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]

    @property
    def src(self) -> Layout:
        """The layout that the tensor has; of a program of one tensor."""
        (transition,) = self.transitions
        return transition.src

    @property
    def dst(self) -> Layout:
        """The layout that the tensor gets; of a program of one tensor."""
        (transition,) = self.transitions
        return transition.dst

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of staging."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        layouts = {layout for x in self.transitions for layout in (x.src, x.dst)}
        return tuple(sorted({rank for layout in layouts for rank in layout.ranks}))

    @cached_property
    def num_dims(self) -> int:
        """Dims of every box."""
        if len(self.transitions) == 1:
            return len(self.src.shape)
        return 1 + max(len(transition.src.shape) for transition in self.transitions)

    def shard_names(self, rank: int) -> tuple[str, ...]:
        """The caller's buffers of ``rank``: its src shards, then its dst shards."""
        return self._shards.get(rank, ())

    @cached_property
    def _shards(self) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for side in (SRC, DST):
            for i, transition in enumerate(self.transitions):
                name = shard_name(side, i, len(self.transitions))
                for rank in transition.layout(side).ranks:
                    found[rank] = (*found.get(rank, ()), name)
        return found

    def transition(self, name: str) -> Transition:
        """What the caller's buffer ``name`` is a shard of."""
        return self.transitions[shard_index(name)]

    def shard_box(self, name: str, rank: int) -> Box:
        """The box of the caller's buffer ``name`` of ``rank``, in the dims of the program."""
        box = self.transition(name).layout(name).cell(rank).box
        return box if len(self.transitions) == 1 else lift(box, shard_index(name), self.num_dims)

    def tensor_dims(self, values: Sequence[_T], name: str) -> tuple[_T, ...]:
        """Of one value a dim of the program, those for the dims of the shard ``name``."""
        first = len(self.transitions) > 1
        return tuple(values[first : first + len(self.transition(name).src.shape)])

    def dtype_of(self, name: str) -> str:
        """The dtype of a buffer."""
        return self.transition(name).dtype(name) if is_shard(name) else self.dtype

    @cached_property
    def buffer(self) -> dict[tuple[str, int], Buffer]:
        """Buffers by (name, rank)."""
        return {(buffer.name, buffer.rank): buffer for buffer in self.buffers}

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The instructions that speak to other ranks."""
        return tuple(i for i in self.instructions if isinstance(i, Collective))

    @cached_property
    def peer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that read each other's memory, as disjoint groups, each ascending."""
        remote = [i.ranks for i in self.instructions if isinstance(i, Copy) and i.is_remote]
        return connected(set(remote))

    def of_rank(self, rank: int) -> Iterator[Instruction]:
        """Instructions that ``rank`` takes part in."""
        for instruction in self.instructions:
            if rank in instruction.ranks:
                yield instruction

    def lifetimes(self, rank: int) -> dict[str, tuple[int, int]]:
        """First and last instruction that uses each buffer of ``rank``; shards always live."""
        always = dict.fromkeys(self.shard_names(rank), (0, len(self.instructions)))
        return self._staging_lifetimes.get(rank, {}) | always

    @cached_property
    def _staging_lifetimes(self) -> dict[int, dict[str, tuple[int, int]]]:
        alive: dict[int, dict[str, tuple[int, int]]] = {}
        for i, instruction in enumerate(self.instructions):
            for rank in instruction.ranks:
                mine = alive.setdefault(rank, {})
                for name in instruction.buffers_of(rank):
                    if name != NO_BUFFER and not is_shard(name):
                        mine[name] = (mine.get(name, (i, i))[0], i)
        return alive

    def arena(self, rank: int) -> Arena:
        """Where the staging buffers of ``rank`` lie: those alive at once never overlap.

        First fit in the order of birth. Offsets are in bytes and aligned for any vector load.
        """
        if rank not in self._arenas:
            self._arenas[rank] = self._arena(rank)
        return self._arenas[rank]

    @cached_property
    def _arenas(self) -> dict[int, Arena]:
        return {}

    def _arena(self, rank: int) -> Arena:
        placed: list[tuple[int, int, int]] = []
        offsets: dict[str, int] = {}
        num_bytes = 0
        lifetimes = self._staging_lifetimes.get(rank, {})
        for name, (first, last) in sorted(lifetimes.items(), key=lambda x: (x[1], x[0])):
            size = self.buffer[name, rank].num_elements * self.item_bytes
            # Those that died before this birth are in nobody's way any more.
            placed = [other for other in placed if other[2] >= first]
            start = 0
            for other, end, _ in placed:
                if other < start + size and start < end:
                    start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            offsets[name] = start
            insort(placed, (start, start + size, last))
            num_bytes = max(num_bytes, start + size)
        return Arena(offsets, num_bytes)

    def peak_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` needs at once: its src and dst shards and its arena."""
        return self.shard_bytes(rank) + self.arena(rank).num_bytes

    def shard_bytes(self, rank: int) -> int:
        """Bytes of the src and dst shards of ``rank``."""
        return sum(
            self.buffer[name, rank].num_elements * ITEM_BYTES[self.dtype_of(name)]
            for name in self.shard_names(rank)
        )

    def __str__(self) -> str:
        lines = [f"program {self.dtype}"]
        for transition in self.transitions:
            lines += transition.lines(self.dtype)
        for buffer in self.buffers:
            pieces = " ".join(map(str, buffer.pieces))
            lines.append(f"buffer {buffer.name} rank {buffer.rank}: {pieces}".rstrip())
        for instruction in self.instructions:
            lines.extend(instruction.lines())
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read the text that ``str`` writes."""
        return _Reader(text).program()


def connected(pairs: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Ranks that pairs join, directly or not: ascending groups, in the order of their first ranks.

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


# --- text ---------------------------------------------------------------------------------------


def _entries_text(entries: tuple[Entry, ...]) -> str:
    return " ".join(f"{e.box}@{e.src_piece}>{e.dst_piece}" for e in entries)


MAX_CHARS = 1 << 26
"""Of a program's text."""

MAX_BOXES = 1 << 20
"""Of a program's text, its lines counted too: some 400 MB in memory. An all-to-all of 512 ranks has
half as many. A ``Program`` that is made in Python has no limit."""


class _Reader:
    """Reads a program line by line; every error names the line.

    Memory and time are in proportion to the text, whoever wrote it: what is counted in it is
    checked before it is made.
    """

    def __init__(self, text: str) -> None:
        self.num_boxes = text.count("\n")
        self.text = text
        self.lines: list[str] = []
        self.at = 0
        # The line that is being read; `at` is past it already.
        self.reading = 0

    def program(self) -> Program:
        try:
            self._check_text()
            self.lines = self.text.splitlines()
            dtype = dtype_name(self._after("program "))
            transitions = [self._transition(dtype)]
            while self.at < len(self.lines) and self.lines[self.at].startswith(f"{SRC} "):
                transitions.append(self._transition(dtype))
            buffers, instructions = [], []
            while self.at < len(self.lines):
                word = self.lines[self.at].split(" ", 1)[0]
                if word == "buffer":
                    buffers.append(self._buffer())
                else:
                    instructions.append(self._instruction(word))
        except (ValueError, IndexError) as error:
            line = self.lines[self.reading] if self.reading < len(self.lines) else "the end"
            raise ProgramError(
                f"cannot parse program, line {self.reading + 1}: {line[:80]!r}: {error}"
            ) from None
        return Program(tuple(transitions), dtype, tuple(buffers), tuple(instructions))

    def _transition(self, dtype: str) -> Transition:
        src, src_dtype = self._side(SRC, dtype)
        dst, dst_dtype = self._side(DST, dtype)
        return Transition(src, dst, src_dtype, dst_dtype)

    def _side(self, side: str, dtype: str) -> tuple[Layout, str]:
        layout, _, own = self._after(f"{side} ").partition(" as ")
        return Layout.parse(layout), dtype_name(own or dtype)

    def _after(self, prefix: str) -> str:
        self.reading = self.at
        line = self.lines[self.at]
        if not line.startswith(prefix):
            raise ValueError(f"expected a line that starts with {quoted(prefix)}")
        self.at += 1
        return line.removeprefix(prefix)

    def _buffer(self) -> Buffer:
        head, _, pieces = self._after("buffer ").partition(":")
        name, word, rank = head.split(" ", 3)
        self._expect("rank", word)
        boxes = [Box.parse(piece) for piece in self._items(pieces)]
        return Buffer(name, integer(rank), tuple(boxes))

    def _instruction(self, word: str) -> Instruction:
        if word == "collective":
            return self._collective()
        head, _, entries = self._after(f"{word} ").partition(": ")
        if word == "zero":
            rank_word, rank, dst = head.split(" ", 3)
            self._expect("rank", rank_word)
            return Zero(integer(rank), dst, self._entries(entries))
        if word not in ("copy", "add"):
            raise ValueError("expected buffer, copy, add, zero or collective")
        rank_word, rank, src, dst = head.split(" ", 4)
        self._expect("rank", rank_word)
        src, is_remote, src_rank = src.partition("@")
        owner = integer(src_rank) if is_remote else integer(rank)
        return Copy(word, integer(rank), src, dst, self._entries(entries), owner)

    def _collective(self) -> Collective:
        words = self._after("collective ").split(" ", 7)
        kind, step_word, step, ranks_word, group, src, dst = words
        self._expect("step ranks", f"{step_word} {ranks_word}")
        index = integer(step)
        # A group has a name a rank on each side: a short text cannot mean many ranks.
        ranks = parse_ranges(group, min(src.count(",") + 1, MAX_RANKS))
        names = tuple(src.split(",", len(ranks))), tuple(dst.split(",", len(ranks)))
        messages = []
        while self.at < len(self.lines) and self.lines[self.at].startswith("  "):
            head, _, entries = self._after("  ").partition(":")
            a, b = head.split("->", 2)
            messages.append(Message(integer(a), integer(b), self._entries(entries)))
        return Collective(kind, index, ranks, *names, tuple(messages))

    def _entries(self, text: str) -> tuple[Entry, ...]:
        entries = []
        for item in self._items(text):
            box, _, pieces = item.partition("@")
            src_piece, dst_piece = pieces.split(">", 2)
            entries.append(Entry(Box.parse(box), integer(src_piece), integer(dst_piece)))
        return tuple(entries)

    # --- what bounds them -----------------------------------------------------------------------

    def _check_text(self) -> None:
        if len(self.text) > MAX_CHARS or self.num_boxes > MAX_BOXES:
            raise ValueError(
                f"the text has {len(self.text)} characters in {self.num_boxes} lines; at most "
                f"{MAX_CHARS} and {MAX_BOXES} are read"
            )
        if not (self.text.isascii() and self.text.replace("\n", "").isprintable()):
            odd = re.search(r"[^\n -~]", self.text)
            assert odd is not None
            self.reading = self.text.count("\n", 0, odd.start())
            self.lines = self.text.split("\n", self.reading + 1)
            raise ValueError(f"{odd[0]!r} is no printable ASCII character")

    def _items(self, text: str) -> list[str]:
        """Boxes, or entries, one after another."""
        self.num_boxes += text.count(" ") + 1
        if self.num_boxes > MAX_BOXES:
            raise ValueError(f"the text has more than {MAX_BOXES} lines and boxes")
        return text.split()

    @staticmethod
    def _expect(word: str, found: str) -> None:
        if word != found:
            raise ValueError(f"expected {word!r}, got {quoted(found)}")
