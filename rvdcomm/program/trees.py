"""Trees as a program: messages of all trees and slices in beats, each beat one exchange.

A hop of a tree runs in a beat: one that sends parts after all that its rank waits for has come, and
one that sends copies after the element has come. The slices of a tree follow each other, one beat
apart. So in each beat all trees send at once, and a relay sends on what came a beat before. All
messages of a beat are one call; ranks of one shared-memory domain read each other's memory instead.

A rank adds parts in the order of the ranks that they come from, its own first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

from rvdcomm.cost.demands import Demand, demand_boxes
from rvdcomm.layout import Box, Layout
from rvdcomm.program.domains import SharedDomains, together
from rvdcomm.program.instructions import (
    NO_BUFFER,
    UNKNOWN_BUFFER,
    UNKNOWN_PIECE,
    Buffer,
    BufferKey,
    Collective,
    Copy,
    Entry,
    Instruction,
    Message,
)
from rvdcomm.program.interleave import Lanes
from rvdcomm.program.program import Program
from rvdcomm.program.shards import DST, SRC, Transition, is_shard
from rvdcomm.synthesis import Forest, Pair, Tree


def program_of_trees(
    src: Layout,
    dst: Layout,
    dtype: str,
    forest: Forest,
    num_slices: int = 1,
    *,
    ranks: Iterable[int] | None = None,
    domains: SharedDomains = (),
) -> Program:
    """The program that runs ``forest``, which serves the demands of the layouts.

    Args:
        src, dst, dtype, forest: what to lower.
        num_slices: slices of every tree, which follow each other.
        ranks: ranks to lower; all if None. Those of one domain are lowered together.
        domains: shared-memory domains: disjoint groups of ranks that map each other's memory.

    Laws (tests/program/test_trees.py): the program of all ranks verifies, gives the right data, and
    sends what the trees say through each wire; that of some ranks is its part that concerns them.
    """
    transition = Transition(src, dst, dtype, dtype)
    members = None if ranks is None else together(ranks, domains)
    lowered = _Lowered(transition, forest, range(num_slices), num_slices, members, domains)
    phases = lowered.phases()
    instructions = tuple(instruction for phase in phases for instruction in phase)
    return Program((transition,), dtype, tuple(lowered.all_buffers()), instructions, members)


def lanes_of_trees(
    transition: Transition,
    dtype: str,
    forest: Forest,
    num_slices: int = 1,
    *,
    ranks: Iterable[int] | None = None,
    domains: SharedDomains = (),
    staged: bool = False,
) -> Lanes:
    """The same for one tensor of many: a lane for each slice, to be joined with other tensors.

    Args:
        transition: its layouts and dtypes. They differ only if nothing is summed, since a sum is
            made where it stays.
        dtype: that of messages.
        forest, num_slices, ranks, domains: as in ``program_of_trees``.
        staged: whether calls may be joined; they have buffers of their own in any case.

    Law (tests/plans/test_many_by_trees.py): joined with others they verify and give the right data.
    """
    members = None if ranks is None else together(ranks, domains)
    buffers: dict[BufferKey, Buffer] = {}
    found = []
    for index in range(num_slices):
        lowered = _Lowered(transition, forest, [index], num_slices, members, domains, f"_{index}")
        found.append(tuple(map(tuple, lowered.phases())))
        buffers |= {(buffer.name, buffer.rank): buffer for buffer in lowered.all_buffers()}
    return Lanes(transition, dtype, staged, members, tuple(buffers.values()), tuple(found))


SUMS = "a"
"""What the names of buffers begin with that hold sums, or what was read from other ranks."""


class _Place(NamedTuple):
    """A piece of a buffer."""

    buffer: str
    piece: int


@dataclass
class _Unit:
    """A slice of a box on one tree.

    Attributes:
        box: the elements.
        tree, demand: what it belongs to.
        at: where its value lies on each rank that has one: a sum of parts, or the whole.
    """

    box: Box
    tree: Tree
    demand: Demand
    at: dict[int, _Place] = field(default_factory=dict)


@dataclass
class _Waiting:
    """Copies of a rank by operation, src rank, buffers and step; and the pieces that they write."""

    copies: dict[tuple[str, int, str, str, int], list[Entry]] = field(default_factory=dict)
    written: set[tuple[str, int, Box]] = field(default_factory=set)


class _Hop(NamedTuple):
    """A hop of a unit, in the order of messages: by ranks, then by units."""

    pair: Pair
    unit: int
    is_sum: bool


def split(box: Box | None, shares: Sequence[Fraction]) -> list[Box | None]:
    """Slabs of a box along its longest dim, by shares that add up to 1; None for empty ones.

    >>> [str(slab) for slab in split(Box((0, 2), (3, 10)), [Fraction(1, 4), Fraction(3, 4)])]
    ['[0:3,2:4]', '[0:3,4:10]']
    """
    if box is None or not box.shape:
        # A scalar is not divided: the largest share has it.
        largest = shares.index(max(shares))
        return [box if i == largest else None for i in range(len(shares))]
    dim = box.shape.index(max(box.shape))
    low, extent = box.lo[dim], box.shape[dim]
    cuts = [low + round(extent * share) for share in accumulate(shares, initial=Fraction())]
    found: list[Box | None] = []
    for a, b in pairwise(cuts):
        lo, hi = (*box.lo[:dim], a, *box.lo[dim + 1 :]), (*box.hi[:dim], b, *box.hi[dim + 1 :])
        found.append(Box(lo, hi) if a < b else None)
    return found


def _contributors(demand: Demand, tree: Tree) -> frozenset[int]:
    """For each part, the first of the tree's ranks that holds it."""
    taken = {tree.root, *(hop.src for hop in tree.sums)}
    return frozenset(min(taken & holders) for holders in demand.parts)


class _Lowered:
    """The buffers and instructions so far of the ranks ``here``, for some of all slices.

    ``suffix`` ends the names of its buffers.
    """

    def __init__(
        self,
        transition: Transition,
        forest: Forest,
        slices: Sequence[int],
        num_slices: int,
        members: tuple[int, ...] | None,
        domains: SharedDomains,
        suffix: str = "",
    ) -> None:
        self.transition, self.forest = transition, forest
        self.num_slices, self.suffix = num_slices, suffix
        # The first beat of each slice.
        self.starts = {index: i * forest.num_turns for i, index in enumerate(slices)}
        self.here = frozenset(
            {*transition.src.ranks, *transition.dst.ranks} if members is None else members
        )
        self.domain = {rank: i for i, domain in enumerate(domains) for rank in domain}
        self.units: list[_Unit] = []
        self.hops: dict[int, list[_Hop]] = {}
        self.buffers: dict[tuple[str, int], list[Box]] = {}
        self.instructions: list[Instruction] = []
        self.ended: list[list[Instruction]] = []
        # Copies that were not emitted yet, by rank.
        self._waiting = {rank: _Waiting() for rank in sorted(self.here)}
        for name in (SRC, DST):
            for rank in transition.layout(name).ranks:
                if rank in self.here:
                    self.buffers[name, rank] = [transition.box(name, rank)]
        self._plan_calls()

    def _plan_calls(self) -> None:
        """The ranks that send or receive messages, and the beats in which some do: for all ranks
        the same, whichever are lowered.
        """
        ranks: set[int] = set()
        self.beats_of_calls: set[int] = set()
        for tree in self.forest.trees:
            for beats in self.forest.beats(tree):
                far = [(pair, at) for pair, at in beats.items() if not self._is_near(pair)]
                ranks.update(rank for pair, _ in far for rank in pair)
                starts = self.starts.values()
                self.beats_of_calls.update(at + start for _, at in far for start in starts)
        self.callers = tuple(sorted(ranks))

    def _is_near(self, pair: Pair) -> bool:
        return pair[0] in self.domain and self.domain[pair[0]] == self.domain.get(pair[1])

    def add_units(
        self, demand: Demand, box: Box, ways: Sequence[tuple[tuple[Tree, ...], Fraction]]
    ) -> None:
        """Cut a box among ways and slices, and note when which part makes which hop."""
        equal = [Fraction(1, self.num_slices)] * self.num_slices
        for (way, _), part in zip(ways, split(box, [share for _, share in ways]), strict=True):
            for tree in way:
                sums, copies = self.forest.beats(tree)
                mine = [
                    (at, pair, beats is sums)
                    for beats in (sums, copies)
                    for pair, at in beats.items()
                    if not self.here.isdisjoint(pair)
                ]
                contributors = _contributors(demand, tree) & self.here
                pieces = split(part, equal) if mine else [None] * self.num_slices
                for index, start in self.starts.items():
                    piece = pieces[index]
                    if piece is None:
                        continue
                    number = len(self.units)
                    at = {rank: _Place(SRC, 0) for rank in contributors}
                    self.units.append(_Unit(piece, tree, demand, at))
                    for beat, pair, is_sum in mine:
                        self.hops.setdefault(beat + start, []).append(_Hop(pair, number, is_sum))

    def phases(self) -> list[list[Instruction]]:
        """All instructions, cut after every point where ranks begin to wait for others."""
        ways = dict(zip(self.forest.demands, self.forest.ways, strict=True))
        for demand, boxes in demand_boxes(self.transition.src, self.transition.dst):
            for box in boxes:
                # What needs no message is in the first slice.
                for rank in sorted(demand.readers & self.here) if 0 in self.starts else ():
                    if demand.is_served(rank):
                        self.copy(rank, _Place(SRC, 0), _Place(DST, 0), box)
                if demand in ways:
                    self.add_units(demand, box, ways[demand])
        for beat in range(self.forest.num_beats_in(len(self.starts))):
            self.run(beat)
        self._emit_all()
        self._end_phase()
        return self.ended

    def _end_phase(self) -> None:
        self.ended.append(self.instructions)
        self.instructions = []

    def all_buffers(self) -> Iterator[Buffer]:
        """The shards, and what was needed in between."""
        for (name, rank), pieces in self.buffers.items():
            yield Buffer(name, rank, tuple(pieces))

    # --- copies ---------------------------------------------------------------------------------

    def copy(
        self,
        rank: int,
        src: _Place,
        dst: _Place,
        box: Box,
        op: str = "copy",
        *,
        src_rank: int | None = None,
        beat: int = 0,
    ) -> None:
        """Copy a box, or add it; boxes between the same buffers become one instruction."""
        src_rank = rank if src_rank is None else src_rank
        if (src.buffer, src.piece, box) in self._waiting[src_rank].written:
            self._emit(src_rank)
        if (dst.buffer, dst.piece, box) in self._waiting[rank].written:
            self._emit(rank)
        waiting = self._waiting[rank]
        waiting.written.add((dst.buffer, dst.piece, box))
        key = op, src_rank, src.buffer, dst.buffer, beat
        waiting.copies.setdefault(key, []).append(Entry(box, src.piece, dst.piece))

    def _emit(self, rank: int) -> None:
        """Emit the copies of a rank that wait."""
        for (op, src_rank, src, dst, beat), entries in self._waiting[rank].copies.items():
            self.instructions.append(Copy(op, rank, src, dst, tuple(entries), src_rank, beat))
        self._waiting[rank] = _Waiting()

    def _emit_all(self) -> None:
        for rank in self._waiting:
            self._emit(rank)

    def _add(self, kind: str, rank: int, box: Box) -> _Place:
        name = kind + self.suffix
        pieces = self.buffers.setdefault((name, rank), [])
        pieces.append(box)
        return _Place(name, len(pieces) - 1)

    # --- beats ----------------------------------------------------------------------------------

    def run(self, beat: int) -> None:
        """The messages and reads of a beat, and what is done with them."""
        hops = sorted(self.hops.pop(beat, ()))
        near = [hop for hop in hops if self._is_near(hop.pair)]
        for hop in near:
            self._publish(hop, beat)
        arrived: list[tuple[_Hop, _Place]] = []
        if beat in self.beats_of_calls:
            arrived = self._call(beat, [hop for hop in hops if not self._is_near(hop.pair)])
        self._emit_all()
        self._end_phase()
        # Reads run while messages are on their way.
        for hop in sorted(near, key=_by_receiver):
            src_rank, rank = hop.pair
            self._receive(hop, rank, self.units[hop.unit].at[src_rank], src_rank, beat)
        for hop, place in arrived:
            self._receive(hop, hop.pair[1], place, hop.pair[1], beat)
        self._emit_all()

    def _publish(self, hop: _Hop, beat: int) -> None:
        """Copy what another rank will read to memory that it maps, unless it is there."""
        unit, rank = self.units[hop.unit], hop.pair[0]
        if is_shard(unit.at[rank].buffer):
            place = self._add(f"p{beat}", rank, unit.box)
            self.copy(rank, unit.at[rank], place, unit.box)
            unit.at[rank] = place

    def _call(self, beat: int, hops: Sequence[_Hop]) -> list[tuple[_Hop, _Place]]:
        """Pack, call, and return where the ranks here find what came, by receiver."""
        packed: dict[_Hop, int] = {}
        for hop in hops:
            rank, unit = hop.pair[0], self.units[hop.unit]
            if rank in self.here:
                place = self._add(f"s{beat}", rank, unit.box)
                self.copy(rank, unit.at[rank], place, unit.box)
                packed[hop] = place.piece
        # Receivers have their pieces in the order of the senders.
        arrived = {
            hop: self._add(f"r{beat}", hop.pair[1], self.units[hop.unit].box)
            for hop in sorted(hops, key=_by_receiver)
            if hop.pair[1] in self.here
        }
        entries: dict[Pair, list[Entry]] = {}
        for hop in hops:
            piece = arrived[hop].piece if hop in arrived else UNKNOWN_PIECE
            entry = Entry(self.units[hop.unit].box, packed.get(hop, UNKNOWN_PIECE), piece)
            entries.setdefault(hop.pair, []).append(entry)
        self._emit_all()
        if not self.here.isdisjoint(self.callers):
            messages = tuple(Message(*pair, tuple(found)) for pair, found in entries.items())
            packs, arrivals = (
                tuple(self._name(f"{side}{beat}{self.suffix}", rank) for rank in self.callers)
                for side in "sr"
            )
            self.instructions.append(
                Collective("all_to_all", beat, self.callers, packs, arrivals, messages)
            )
        return list(arrived.items())

    def _name(self, name: str, rank: int) -> str:
        if rank not in self.here:
            return UNKNOWN_BUFFER
        return name if (name, rank) in self.buffers else NO_BUFFER

    def _receive(self, hop: _Hop, rank: int, place: _Place, src_rank: int, beat: int) -> None:
        """Take what came to a rank: from its own memory, or from that of another one."""
        unit = self.units[hop.unit]
        is_own, is_reader = src_rank == rank, rank in unit.demand.readers
        is_root = rank == unit.tree.root
        known = unit.at.get(rank) if hop.is_sum else None
        # What is needed here, and the sum at a root that needs it, is made where it stays.
        if is_reader and (is_root or not hop.is_sum):
            total = _Place(DST, 0)
        elif known is None and is_own:
            unit.at[rank] = place
            return
        elif known is not None and known.buffer.startswith(SUMS):
            total = known
        else:
            total = self._add(f"{SUMS}{beat}", rank, unit.box)
        if known is not None and known != total:
            self.copy(rank, known, total, unit.box)
        op = "copy" if known is None else "add"
        step = 0 if is_own else beat
        self.copy(rank, place, total, unit.box, op, src_rank=src_rank, beat=step)
        # A copy that goes on is sent from where it came to.
        unit.at[rank] = place if is_own and not hop.is_sum else total


def _by_receiver(hop: _Hop) -> tuple[int, int, int]:
    return hop.pair[1], hop.pair[0], hop.unit
