"""Trees as a program: messages of all trees and slices in beats, each beat one exchange.

A hop of a tree runs in a beat: one that sends parts after all that its rank waits for has come, and
one that sends copies after the element has come. The slices of a tree follow each other, one beat
apart. So in each beat all trees send at once, and a relay sends on what came a beat before. All
messages of a beat are one call.

A rank adds parts in the order of the ranks that they come from, its own first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

from rvdcomm.cost.demands import Demand, demand_boxes
from rvdcomm.layout import Box, Layout
from rvdcomm.program.instructions import (
    NO_BUFFER,
    Buffer,
    Collective,
    Copy,
    Entry,
    Instruction,
    Message,
)
from rvdcomm.program.program import Program
from rvdcomm.program.shards import DST, SRC, Transition
from rvdcomm.synthesis import Forest, Pair, Tree


def program_of_trees(
    src: Layout, dst: Layout, dtype: str, forest: Forest, num_slices: int = 1
) -> Program:
    """The program of all ranks that runs ``forest``, which serves the demands of the layouts.

    Law (tests/program/test_trees.py): it verifies, gives the right data, and sends what the trees
    say through each wire.
    """
    lowered = _Lowered(Transition(src, dst, dtype, dtype))
    ways = dict(zip(forest.demands, forest.ways, strict=True))
    units: list[_Unit] = []
    for demand, boxes in demand_boxes(src, dst):
        for box in boxes:
            for rank in sorted(demand.readers):
                if demand.is_served(rank):
                    lowered.copy(rank, _Place(SRC, 0), _Place(DST, 0), box)
            if demand in ways:
                units += _units(demand, box, ways[demand], num_slices)
    for beat in range(max((unit.end for unit in units), default=0)):
        lowered.run(beat, units)
    return lowered.program()


class _Place(NamedTuple):
    """A piece of a buffer."""

    buffer: str
    piece: int


@dataclass
class _Unit:
    """A slice of a box on one tree.

    Attributes:
        box: the elements.
        start: the beat of its first hops.
        sums, copies: the beat of each hop, counted from the start.
        contributors: the ranks whose own part is added.
        tree, demand: what it belongs to.
        at: where its value lies on each rank that has one: a sum of parts, or the whole.
    """

    box: Box
    start: int
    sums: Mapping[Pair, int]
    copies: Mapping[Pair, int]
    contributors: frozenset[int]
    tree: Tree
    demand: Demand
    at: dict[int, _Place] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The beat after the last hop."""
        return self.start + 1 + max([-1, *self.sums.values(), *self.copies.values()])


def _units(
    demand: Demand,
    box: Box,
    ways: Sequence[tuple[tuple[Tree, ...], Fraction]],
    num_slices: int,
) -> Iterator[_Unit]:
    shares = split(box, [share for _, share in ways])
    for (way, _), part in zip(ways, shares, strict=True):
        for tree in way:
            sums, copies = tree.beats()
            for index, piece in enumerate(split(part, [Fraction(1, num_slices)] * num_slices)):
                if piece is not None:
                    contributors = _contributors(demand, tree)
                    unit = _Unit(piece, index, sums, copies, contributors, tree, demand)
                    unit.at = {rank: _Place(SRC, 0) for rank in contributors}
                    yield unit


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
    """The buffers and instructions so far."""

    def __init__(self, transition: Transition) -> None:
        self.transition = transition
        self.buffers: dict[tuple[str, int], list[Box]] = {}
        self.instructions: list[Instruction] = []
        for name in (SRC, DST):
            for rank in transition.layout(name).ranks:
                self.buffers[name, rank] = [transition.box(name, rank)]
        self.ranks = tuple(sorted({*transition.src.ranks, *transition.dst.ranks}))

    def program(self) -> Program:
        buffers = (
            Buffer(name, rank, tuple(pieces)) for (name, rank), pieces in self.buffers.items()
        )
        dtype = self.transition.src_dtype
        return Program((self.transition,), dtype, tuple(buffers), tuple(self.instructions))

    def copy(self, rank: int, src: _Place, dst: _Place, box: Box, op: str = "copy") -> None:
        entry = Entry(box, src.piece, dst.piece)
        self.instructions.append(Copy(op, rank, src.buffer, dst.buffer, (entry,)))

    def _add(self, name: str, rank: int, box: Box) -> _Place:
        pieces = self.buffers.setdefault((name, rank), [])
        pieces.append(box)
        return _Place(name, len(pieces) - 1)

    def run(self, beat: int, units: Sequence[_Unit]) -> None:
        """The messages of a beat, and what is done with them."""
        sent = sorted(
            (
                (hop, number)
                for number, unit in enumerate(units)
                for hops in (unit.sums, unit.copies)
                for hop, own in hops.items()
                if unit.start + own == beat
            ),
        )
        packed: dict[tuple[Pair, int], int] = {}
        for (a, b), number in sent:
            unit = units[number]
            place = self._add(f"s{beat}", a, unit.box)
            self.copy(a, unit.at[a], place, unit.box)
            packed[(a, b), number] = place.piece
        # Receivers have their pieces in the order of the senders.
        arrived: dict[tuple[Pair, int], _Place] = {}
        for hop, number in sorted(sent, key=lambda each: (each[0][1], each[0][0], each[1])):
            arrived[hop, number] = self._add(f"r{beat}", hop[1], units[number].box)
        self._call(beat, sent, packed, arrived, units)
        for (hop, number), place in arrived.items():
            self._receive(units[number], hop, place, number)

    def _call(
        self,
        beat: int,
        sent: Sequence[tuple[Pair, int]],
        packed: Mapping[tuple[Pair, int], int],
        arrived: Mapping[tuple[Pair, int], _Place],
        units: Sequence[_Unit],
    ) -> None:
        entries: dict[Pair, list[Entry]] = {}
        for each in sent:
            hop, number = each
            entry = Entry(units[number].box, packed[each], arrived[each].piece)
            entries.setdefault(hop, []).append(entry)
        messages = tuple(Message(*hop, tuple(found)) for hop, found in sorted(entries.items()))
        packs, arrivals = (
            tuple(name if (name, rank) in self.buffers else NO_BUFFER for rank in self.ranks)
            for name in (f"s{beat}", f"r{beat}")
        )
        call = Collective("all_to_all", beat, self.ranks, packs, arrivals, messages)
        self.instructions.append(call)

    def _receive(self, unit: _Unit, hop: Pair, place: _Place, number: int) -> None:
        rank = hop[1]
        is_reader = rank in unit.demand.readers
        if hop in unit.copies and unit.copies[hop] + unit.start == int(place.buffer[1:]):
            unit.at[rank] = place
            if is_reader:
                self.copy(rank, place, _Place(DST, 0), unit.box)
            return
        # A part. The sum at a root that needs it is made where it stays.
        is_root = rank == unit.tree.root
        known = unit.at.get(rank)
        if is_root and is_reader:
            total = _Place(DST, 0)
        elif known is None:
            unit.at[rank] = place
            return
        elif known.buffer == f"a{number}":
            total = known
        else:
            total = self._add(f"a{number}", rank, unit.box)
        if known != total:
            if known is not None:
                self.copy(rank, known, total, unit.box)
            unit.at[rank] = total
        self.copy(rank, place, total, unit.box, "copy" if known is None else "add")
