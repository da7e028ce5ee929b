"""Lowering: from a path to the instructions of some ranks, without superfluous copies.

Ranks can be lowered alone: their partners, their groups and the order of their messages are
computed from the layouts. The program of all ranks is the union of the programs of each rank. Ranks
that read each other's memory are lowered together, since a reader must know where its partner's
buffers lie.

The lowering goes through the steps in order. For every rank it knows *where* each region of the
current state lies (``memory.py``). So a slice costs nothing, an unpack merges with the next pack,
contiguous pieces are sent and received in place (``group_moves.py``), and ranks that share memory
read each other's regions where they lie (``share.py``). A state is written to a buffer only where
parts are added or where it is ``dst`` (docs/adr/0003-fusion-happens-while-lowering.md).

A program may be cut into slices, which are pipelined through the steps (``slices.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from rvdcomm.layout import SUMMED_BY_BACKENDS, Box
from rvdcomm.network import Topology
from rvdcomm.planning.cells import Cells
from rvdcomm.planning.exchange import Move
from rvdcomm.planning.path import Path, Step
from rvdcomm.program.domains import SharedDomains, together
from rvdcomm.program.group_moves import Destination, GroupMoves
from rvdcomm.program.instructions import (
    UNKNOWN_BUFFER,
    Collective,
    Entry,
    Instruction,
    Message,
)
from rvdcomm.program.interleave import Lanes, interleaved
from rvdcomm.program.memory import Arrival, LoweredMemory, PiecePlace
from rvdcomm.program.program import Program
from rvdcomm.program.regions import BoxIndex, is_filled, window
from rvdcomm.program.shards import DST, SRC, Transition, wire_dtype
from rvdcomm.program.share import publish
from rvdcomm.program.slices import Slicing, slicing_of
from rvdcomm.program.traffic import StepExchange


def lower(
    path: Path,
    dtype: str,
    topology: Topology,
    *,
    ranks: Iterable[int] | None = None,
    domains: SharedDomains = (),
    num_slices: int = 1,
) -> Program:
    """The program that runs ``path`` on tensors of ``dtype``.

    Args:
        path, dtype, topology: what to lower; the topology decides which holders serve a need.
        ranks: ranks to lower; all if None. Ranks of one domain are lowered together.
        domains: shared-memory domains: disjoint groups of ranks that map each other's memory.
        num_slices: the most slices of the tensor that may overlap in time.

    Laws (tests/program/test_lower.py): for all options the program of all ranks verifies and gives
    the same data; the program of some ranks is the part of that program that concerns them.
    """
    transition = Transition(path.src, path.dst, dtype, dtype, path.view)
    found = lanes(path, transition, topology, ranks=ranks, domains=domains, num_slices=num_slices)
    return Program(
        (transition,), dtype, found.buffers, tuple(interleaved(found.lanes)), found.members
    )


def lanes(
    path: Path,
    transition: Transition,
    topology: Topology,
    *,
    ranks: Iterable[int] | None = None,
    domains: SharedDomains = (),
    num_slices: int = 1,
    staged: bool = False,
) -> Lanes:
    """The instructions that run ``path``, lane by lane, before they are put in one order.

    Args:
        path, topology, ranks, domains, num_slices: as in ``lower``.
        transition: the layouts of the path, with the dtypes of src and dst, which may differ.
        staged: give every collective staging buffers of its own, so that it can be joined with
            others.
    """
    dtype = wire_dtype(transition)
    members = None if ranks is None else together(ranks, domains)
    converted = {name for name in (SRC, DST) if transition.dtype(name) != dtype}
    memory = LoweredMemory(frozenset(converted), staged)
    here = path.ranks if members is None else members
    sides = {
        name: tuple(rank for rank in here if rank in layout)
        for name, layout in ((SRC, path.src), (DST, path.dst))
    }
    for name, mine in sides.items():
        for rank in mine:
            memory.add_buffer(name, rank, (transition.box(name, rank),))
    step_exchanges = [
        StepExchange(index, number, step, topology, domains, path.view)
        for index, step in enumerate(path.steps)
        for number in range(len(step.step_exchanges))
    ]
    slicing = slicing_of(path, num_slices)
    found = [
        _Lane(path, dtype, memory, slicing, index, here, sides).phases(step_exchanges)
        for index in range(slicing.num_slices)
    ]
    return Lanes(
        transition,
        dtype,
        staged,
        members,
        tuple(memory.buffers.values()),
        tuple(tuple(map(tuple, phases)) for phases in found),
    )


@dataclass
class _Lane:
    """The lowering of one slice through all exchanges, for the ranks ``here``.

    ``sides`` are the ranks of ``here`` in src, and those in dst.
    """

    path: Path
    dtype: str
    memory: LoweredMemory
    slicing: Slicing
    index: int
    here: tuple[int, ...]
    sides: Mapping[str, tuple[int, ...]]

    def phases(self, step_exchanges: list[StepExchange]) -> list[list[Instruction]]:
        """The slice's instructions, cut after every point where ranks begin to wait for others."""
        self.done: list[list[Instruction]] = []
        memory = self.memory
        memory.step = 0
        memory.where = {
            rank: [
                PiecePlace(box, SRC, 0, rank)
                for box in self._slice(memory.buffers[SRC, rank].pieces)
            ]
            for rank in self.sides[SRC]
        }
        if SRC in memory.converted and self.path.src.rvd.v > 1:
            self._convert()
        waiting = list(step_exchanges)
        while waiting:
            step_exchange = waiting.pop(0)
            memory.step = step_exchange.index
            if step_exchange.step.kind == "all_reduce" and self._backend_may_sum(step_exchange):
                waiting.pop(0)
                self._all_reduce(step_exchange.index, step_exchange.step, is_last=not waiting)
            elif step_exchange.step.num_slices > 1:
                self._windows(step_exchange, is_last=not waiting)
            else:
                self._step_exchange(step_exchange, is_last=not waiting)
        for rank in self.sides[DST]:
            self._finish(rank)
        self._end_phase()
        return self.done

    def _convert(self) -> None:
        """Convert the src shards to the dtype of staging, since terms of a sum have one dtype."""
        memory, name = self.memory, f"x{self.memory.new_number()}"
        for rank in self.sides[SRC]:
            boxes = tuple(place.box for place in memory.where[rank])
            memory.copy_shard(rank, memory.add_buffer(name, rank, boxes))
            memory.settle(name, rank, boxes)

    def _slice(self, boxes: Iterable[Box]) -> tuple[Box, ...]:
        return self.slicing.of_boxes(boxes, self.index)

    def _end_phase(self) -> None:
        self.done.append(self.memory.instructions)
        self.memory.instructions = []

    def _target(
        self,
        step_exchange: StepExchange,
        moves: Iterable[Move],
        number: str,
        is_dst: bool,
        in_place: bool,
    ) -> Destination:
        is_dst = is_dst and DST not in self.memory.converted
        boxes: dict[int, tuple[Box, ...]] = {}
        for rank in self.here:
            if rank in step_exchange.state:
                cells = step_exchange.target(rank)
                boxes[rank] = self._slice(cells.boxes(cells.key(rank)))
        arriving: dict[int, list[Move]] = {rank: [] for rank in boxes}
        for move in moves:
            if move.dst_rank in arriving:
                arriving[move.dst_rank].append(move)
        return Destination(
            name=DST if is_dst else f"x{number}",
            boxes=boxes,
            pieces={r: self.memory.buffers[DST, r].pieces for r in boxes} if is_dst else boxes,
            needs_sum={rank: _has_sum(found) for rank, found in arriving.items()},
            in_place=in_place,
        )

    def _step_exchange(self, step_exchange: StepExchange, is_last: bool) -> None:
        """Lower one exchange, and write the new state to a buffer on the ranks that need this."""
        memory, number = self.memory, self.memory.new_number()
        moves = [
            Move(m.src_rank, m.dst_rank, m.part, box)
            for m in step_exchange.moves(step_exchange.taking_part(self.here))
            for box in self._slice([m.box])
        ]
        target = self._target(step_exchange, moves, number, is_last, in_place=not memory.staged)
        arrivals = self._arrivals(step_exchange, moves, target, number)
        self._end_phase()
        where: dict[int, list[PiecePlace]] = {}
        for rank, boxes in target.boxes.items():
            mine = arrivals.get(rank, [])
            came = [arrival.move.box for arrival in mine]
            is_whole = not target.needs_sum[rank] and is_filled(boxes, came)
            if is_whole and any(a.place.buffer != target.name for a in mine):
                where[rank] = [
                    PiecePlace(a.move.box, a.place.buffer, a.place.piece, a.place.rank)
                    for a in mine
                ]
                continue
            if not is_whole:
                buffer = memory.add_buffer(target.name, rank, target.pieces[rank])
                written: list[Box] = []
                memory.accumulate(rank, buffer, mine, written)
                memory.zero_rest(rank, buffer, boxes, written)
            is_dst = target.name == DST
            where[rank] = [
                PiecePlace(box, target.name, 0 if is_dst else i, rank)
                for i, box in enumerate(boxes)
            ]
        memory.where = where

    def _arrivals(
        self, step_exchange: StepExchange, moves: Iterable[Move], target: Destination, number: str
    ) -> dict[int, list[Arrival]]:
        """Publish moves inside domains, emit one call per group; returns the arrivals by rank."""
        near: list[Move] = []
        here = step_exchange.taking_part(self.here)
        own: dict[int, list[Move]] = {rank: [] for rank in here}
        for move in moves:
            if step_exchange.is_near(move):
                near.append(move)
            else:
                own[move.dst_rank if move.dst_rank in own else move.src_rank].append(move)
        found = publish(self.memory, near, f"p{number}")
        for group in step_exchange.groups(here):
            members = tuple(rank for rank in group if rank in own)
            mine = sorted(move for rank in members for move in own.pop(rank))
            received: dict[int, list[Move]] = {}
            for move in mine:
                if move.dst_rank == members[0]:
                    received.setdefault(move.src_rank, []).append(move)
            is_gather = step_exchange.is_gather(group, received)
            call = GroupMoves(self.memory, target, group, members, tuple(mine), is_gather, number)
            found += call.emit(step_exchange.index)
        for alone in own.values():
            found += self.memory.arrivals_at_home(alone)
        by_rank: dict[int, list[Arrival]] = {}
        for arrival in found:
            by_rank.setdefault(arrival.move.dst_rank, []).append(arrival)
        return by_rank

    def _windows(self, step_exchange: StepExchange, is_last: bool) -> None:
        """Lower an exchange in windows: each sends a slice of every move, then frees its staging.

        The windows of one part come before those of the next, so sums keep their order of parts.
        """
        memory, moves = self.memory, step_exchange.moves(step_exchange.taking_part(self.here))
        target = self._target(step_exchange, moves, memory.new_number(), is_last, in_place=False)
        written: dict[int, list[Box]] = {rank: [] for rank in target.boxes}
        for part in range(self.path.src.rvd.v):
            mine = [move for move in moves if move.part == part]
            for i in range(step_exchange.step.num_slices):
                sliced = [
                    Move(m.src_rank, m.dst_rank, m.part, box)
                    for m in mine
                    for box in window(m.box, i, step_exchange.step.num_slices)
                ]
                arrivals = self._arrivals(step_exchange, sliced, target, memory.new_number())
                for rank, found in sorted(arrivals.items()):
                    buffer = memory.add_buffer(target.name, rank, target.pieces[rank])
                    memory.accumulate(rank, buffer, found, written[rank])
        memory.where = {}
        for rank, boxes in target.boxes.items():
            buffer = memory.add_buffer(target.name, rank, target.pieces[rank])
            memory.zero_rest(rank, buffer, boxes, written[rank])
            memory.settle(target.name, rank, boxes)

    def _backend_may_sum(self, step_exchange: StepExchange) -> bool:
        """Whether the backend's all_reduce keeps our promise of equal bits on all replicas.

        A backend sums in a fixed order of ranks. If in every group the order of ranks is the order
        of parts, all groups sum their parts in the same order. The backend is not used for ranks of
        one domain, which add faster by reading each other's memory.
        """
        step = step_exchange.step
        if self.dtype not in SUMMED_BY_BACKENDS:
            return False
        if step_exchange.domains and any(map(step_exchange.shares_memory, step.groups)):
            return False
        # The axes of parts have the order of the axes of positions. If the ranks ascend with the
        # positions, so do the parts in every group.
        ranks = step.src.ranks
        if all(a < b for a, b in pairwise(ranks)):
            return True
        cells = Cells(step.src.source)
        part = {rank: cells.part(rank) for rank in ranks}
        in_group = ([part[rank] for rank in group] for group in step.groups)
        return all(parts == sorted(set(parts)) for parts in in_group)

    def _all_reduce(self, index: int, step: Step, is_last: bool) -> None:
        """Copy the shard to where the result goes, and let the backend sum in place."""
        memory, number = self.memory, self.memory.new_number()
        # A slice of dst is not one run of memory.
        is_whole = self.slicing.num_slices == 1 and not memory.staged
        is_dst = is_last and is_whole and DST not in memory.converted
        name = DST if is_dst else f"x{number}"
        cells = Cells(step.dst.source, view=self.path.view)
        here = [rank for rank in self.here if rank in step]
        shards = {rank: self._slice(cells.boxes(cells.key(rank))) for rank in here}
        for group in sorted({step.group(rank) for rank in here}):
            messages = []
            for rank in (rank for rank in group if rank in shards):
                buffer = memory.add_buffer(name, rank, shards[rank])
                memory.copy_shard(rank, buffer)
                whole = tuple(Entry(box, i, i) for i, box in enumerate(shards[rank]))
                messages.append(Message(rank, rank, whole))
            names = tuple(name if rank in shards else UNKNOWN_BUFFER for rank in group)
            if messages[0].num_elements:
                memory.instructions.append(
                    Collective("all_reduce", index, group, names, names, tuple(messages))
                )
        self._end_phase()
        for rank, boxes in shards.items():
            memory.settle(name, rank, boxes)

    def _finish(self, rank: int) -> None:
        """Copy boxes that are not in dst yet; zero boxes that no part came for (dst with V > 1)."""
        memory = self.memory
        buffer = memory.buffers[DST, rank]
        memory.copy_shard(rank, buffer)
        boxes = self._slice(buffer.pieces)
        memory.zero_rest(rank, buffer, boxes, [place.box for place in memory.where.get(rank, [])])


def _has_sum(moves: list[Move]) -> bool:
    """Whether some element arrives in more than one part; boxes of one part are disjoint."""
    if len({move.part for move in moves}) < 2:
        return False
    index = BoxIndex([move.box for move in moves])
    return any(len(index.meeting(move.box)) > 1 for move in moves)
