"""Lowering: from a path to a program, fusing what needs no memory traffic of its own.

While it walks the steps, the lowering knows for every rank *where* each region of the current state
lies (``memory.py``). So a slice is free, an unpack merges with the next pack, contiguous pieces are
sent and received in place (``call.py``), what ranks of one island need of each other is read where
it lies (``share.py``), and a state is written out only where parts are added or where it is
``dst``. With ``fuse=False`` every step packs, sends and unpacks: the plain meaning, for tests to
compare with.

A program may be cut into slices that follow one another through the steps (``slices.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rvdcomm.layout import ITEM_BYTES, SUMMED_BY_BACKENDS, Box, Topology
from rvdcomm.planning.exchange import Move
from rvdcomm.planning.path import Path, State, Step
from rvdcomm.program.call import Call, Target, components
from rvdcomm.program.instructions import Buffer, Collective, Entry, Instruction, Message
from rvdcomm.program.memory import Arrival, Memory, Place
from rvdcomm.program.program import Program
from rvdcomm.program.regions import is_filled, window
from rvdcomm.program.shards import DST, SRC, Transition
from rvdcomm.program.share import Groups, publish, split_near
from rvdcomm.program.slices import Slicing, interleaved

__all__ = ["Lanes", "lanes", "lower", "wire_dtype"]


def lower(
    path: Path,
    dtype: str,
    topology: Topology,
    *,
    islands: Groups = (),
    num_slices: int = 1,
    fuse: bool = True,
) -> Program:
    """The program that runs ``path`` on tensors of ``dtype``.

    Args:
        path, dtype, topology: what to lower; the topology says whom a need is taken from.
        islands: disjoint groups of ranks that can map each other's memory.
        num_slices: slices of the tensor that overlap in time, at most.
        fuse: leave out copies that are not needed.

    Law (tests/program/test_lower.py): it verifies, and gives the same data, for all options.
    """
    transition = Transition(path.src, path.dst, dtype, dtype)
    found = lanes(path, transition, topology, islands=islands, num_slices=num_slices, fuse=fuse)
    return Program((transition,), dtype, found.buffers, tuple(interleaved(found.lanes)))


@dataclass(frozen=True)
class Lanes:
    """A path as instructions: lanes, one a slice of the tensor, of phases.

    Lanes are independent of each other. A phase ends where ranks begin to wait for others.
    ``staged`` says that every collective has buffers of its own.
    """

    transition: Transition
    dtype: str
    staged: bool
    buffers: tuple[Buffer, ...]
    lanes: tuple[tuple[tuple[Instruction, ...], ...], ...]


def wire_dtype(transition: Transition) -> str:
    """What is sent: the narrower dtype of the two, the wider one if parts have to be summed.

    So that values are rounded once, after they are summed, and no needless byte travels.
    """
    dtypes = sorted((transition.src_dtype, transition.dst_dtype), key=ITEM_BYTES.__getitem__)
    return dtypes[-1] if transition.src.rvd.v > 1 else dtypes[0]


def lanes(
    path: Path,
    transition: Transition,
    topology: Topology,
    *,
    islands: Groups = (),
    num_slices: int = 1,
    fuse: bool = True,
    staged: bool = False,
) -> Lanes:
    """The instructions that run ``path``, before they are put in one order.

    Args:
        path, topology, islands, num_slices, fuse: as of ``lower``.
        transition: the path's ends, with dtypes that may differ.
        staged: let every collective work on staging buffers of its own alone, so that it can be
            joined with others.
    """
    dtype = wire_dtype(transition)
    converted = {name for name in (SRC, DST) if transition.dtype(name) != dtype}
    memory = Memory(frozenset(converted), staged)
    for name, layout in ((SRC, path.src), (DST, path.dst)):
        for rank in sorted(layout.ranks):
            memory.add_buffer(name, rank, (layout.cell(rank).box,))
    legs = [
        _Leg(index, step, state, moves)
        for index, step in enumerate(path.steps)
        for (_, state), moves in zip(step.legs, step.moves(topology), strict=True)
    ]
    boxes = [layout.cell(rank).box for layout in (path.src, path.dst) for rank in layout.ranks]
    boxes += [move.box for leg in legs for move in leg.moves]
    boxes += [box for leg in legs for h in leg.state.placement.holdings for box in h.boxes]
    slicing = Slicing.of(boxes, num_slices)
    found = [
        _Lane(path, dtype, memory, slicing, index, islands, fuse).phases(legs)
        for index in range(slicing.num_slices)
    ]
    return Lanes(
        transition,
        dtype,
        staged,
        tuple(memory.buffers.values()),
        tuple(tuple(map(tuple, phases)) for phases in found),
    )


@dataclass(frozen=True)
class _Leg:
    """One exchange of a step: the state that it makes, and all moves of all ranks."""

    index: int
    step: Step
    state: State
    moves: tuple[Move, ...]


@dataclass
class _Lane:
    """One slice of the tensor on its way through all legs."""

    path: Path
    dtype: str
    memory: Memory
    slicing: Slicing
    index: int
    islands: Groups
    fuse: bool

    def phases(self, legs: list[_Leg]) -> list[list[Instruction]]:
        """The slice's instructions, cut after every point where ranks begin to wait for others."""
        self.done: list[list[Instruction]] = []
        memory = self.memory
        memory.where = {
            rank: [Place(box, SRC, 0, rank) for box in self._slice([self.path.src.cell(rank).box])]
            for rank in self.path.src.ranks
        }
        if SRC in memory.converted and self.path.src.rvd.v > 1:
            self._convert()
        waiting = list(legs)
        while waiting:
            leg = waiting.pop(0)
            if leg.step.kind == "all_reduce" and self._backend_may_sum(leg.step):
                waiting.pop(0)
                self._all_reduce(leg.index, leg.step, is_last=not waiting)
            elif leg.step.num_slices > 1:
                self._windows(leg, is_last=not waiting)
            else:
                self._leg(leg, is_last=not waiting)
        for rank in sorted(self.path.dst.ranks):
            self._finish(rank)
        self._end_phase()
        return self.done

    def _convert(self) -> None:
        """Begin with shards in the dtype of staging: sums have terms of one dtype."""
        memory, name = self.memory, self.memory.new_name("x")
        for rank in sorted(self.path.src.ranks):
            boxes = tuple(place.box for place in memory.where[rank])
            memory.copy_shard(rank, memory.add_buffer(name, rank, boxes))
            memory.settle(name, rank, boxes)

    def _slice(self, boxes: Iterable[Box]) -> tuple[Box, ...]:
        return self.slicing.of_boxes(boxes, self.index)

    def _end_phase(self) -> None:
        self.done.append(self.memory.take_instructions())

    def _target(self, state: State, moves: Iterable[Move], is_dst: bool, in_place: bool) -> Target:
        is_dst = is_dst and DST not in self.memory.converted
        boxes = {rank: self._slice(h.boxes) for rank, h in state.placement.by_rank.items()}
        arriving: dict[int, list[Move]] = {rank: [] for rank in boxes}
        for move in moves:
            arriving[move.dst_rank].append(move)
        return Target(
            name=DST if is_dst else self.memory.new_name("x"),
            boxes=boxes,
            pieces={r: (self.path.dst.cell(r).box,) for r in boxes} if is_dst else boxes,
            needs_sum={rank: _has_sum(found) for rank, found in arriving.items()},
            in_place=in_place,
        )

    def _leg(self, leg: _Leg, is_last: bool) -> None:
        """Move the current state to the next one, and write it out on ranks that must."""
        memory = self.memory
        moves = [
            Move(m.src_rank, m.dst_rank, m.part, box)
            for m in leg.moves
            for box in self._slice([m.box])
        ]
        target = self._target(leg.state, moves, is_last, self.fuse and not memory.staged)
        arrivals = self._arrivals(leg.index, moves, target)
        self._end_phase()
        where: dict[int, list[Place]] = {}
        for rank, boxes in target.boxes.items():
            mine = arrivals.get(rank, [])
            came = [arrival.move.box for arrival in mine]
            is_whole = self.fuse and not target.needs_sum[rank] and is_filled(boxes, came)
            if is_whole and any(a.place.buffer != target.name for a in mine):
                where[rank] = [
                    Place(a.move.box, a.place.buffer, a.place.piece, a.place.rank) for a in mine
                ]
                continue
            if not is_whole:
                buffer = memory.add_buffer(target.name, rank, target.pieces[rank])
                memory.accumulate(rank, buffer, mine, written=[])
                memory.zero_rest(rank, buffer, boxes, came)
            is_dst = target.name == DST
            where[rank] = [
                Place(box, target.name, 0 if is_dst else i, rank) for i, box in enumerate(boxes)
            ]
        memory.where = where

    def _arrivals(
        self, index: int, moves: Iterable[Move], target: Target
    ) -> dict[int, list[Arrival]]:
        """Share inside islands, emit a call for every other group; where all boxes lie, by rank."""
        near, rest = split_near(moves, self.islands)
        found = publish(self.memory, near)
        for group, members in components(rest):
            if len(group) > 1:
                found += Call(self.memory, target, group, tuple(members), self.fuse).emit(index)
            else:
                found += self.memory.arrivals_at_home(members)
        by_rank: dict[int, list[Arrival]] = {}
        for arrival in found:
            by_rank.setdefault(arrival.move.dst_rank, []).append(arrival)
        return by_rank

    def _windows(self, leg: _Leg, is_last: bool) -> None:
        """An exchange in windows: each sends one slice of every move, then frees its staging.

        Part by part, so that sums keep their order of parts whatever the windows are.
        """
        memory = self.memory
        target = self._target(leg.state, leg.moves, is_last, in_place=False)
        written: dict[int, list[Box]] = {rank: [] for rank in target.boxes}
        for part in sorted({move.part for move in leg.moves}):
            mine = [move for move in leg.moves if move.part == part]
            for i in range(leg.step.num_slices):
                sliced = [
                    Move(m.src_rank, m.dst_rank, m.part, box)
                    for m in mine
                    for box in window(m.box, i, leg.step.num_slices)
                ]
                for rank, found in sorted(self._arrivals(leg.index, sliced, target).items()):
                    buffer = memory.add_buffer(target.name, rank, target.pieces[rank])
                    memory.accumulate(rank, buffer, found, written[rank])
        memory.where = {}
        for rank, boxes in target.boxes.items():
            buffer = memory.add_buffer(target.name, rank, target.pieces[rank])
            memory.zero_rest(rank, buffer, boxes, written[rank])
            memory.settle(target.name, rank, boxes)

    def _backend_may_sum(self, step: Step) -> bool:
        """Whether the backend's all_reduce keeps our promise of equal bits on all replicas.

        A backend sums in its own fixed order of ranks: where the order of ranks is the order of
        parts in every group, equal parts are summed in equal order in all of them. Ranks of one
        island add faster by reading.
        """
        part = {rank: h.part for rank, h in step.src.placement.by_rank.items()}
        home = {rank: i for i, island in enumerate(self.islands) for rank in island}
        return self.dtype in SUMMED_BY_BACKENDS and all(
            [part[rank] for rank in group] == sorted({part[rank] for rank in group})
            and len({home.get(rank, -rank - 1) for rank in group}) == len(group)
            for group in step.groups
        )

    def _all_reduce(self, index: int, step: Step, is_last: bool) -> None:
        """Copy the shard to where the result goes, and let the backend sum in place."""
        memory = self.memory
        # A slice of dst is no single run of memory.
        is_whole = self.slicing.num_slices == 1 and not memory.staged
        is_dst = is_last and is_whole and DST not in memory.converted
        name = DST if is_dst else memory.new_name("x")
        shards = {r: self._slice(h.boxes) for r, h in step.dst.placement.by_rank.items()}
        for group in step.groups:
            messages = []
            for rank in group:
                buffer = memory.add_buffer(name, rank, shards[rank])
                memory.copy_shard(rank, buffer)
                whole = tuple(Entry(box, i, i) for i, box in enumerate(shards[rank]))
                messages.append(Message(rank, rank, whole))
            names = (name,) * len(group)
            if messages[0].num_elements:
                memory.instructions.append(
                    Collective("all_reduce", index, group, names, names, tuple(messages))
                )
        self._end_phase()
        for rank, boxes in shards.items():
            memory.settle(name, rank, boxes)

    def _finish(self, rank: int) -> None:
        """Copy what does not lie in dst yet, and zero what no part came for."""
        memory = self.memory
        buffer = memory.buffers[DST, rank]
        memory.copy_shard(rank, buffer)
        came = [place.box for place in memory.where.get(rank, [])]
        memory.zero_rest(rank, buffer, self._slice(buffer.pieces), came)


def _has_sum(moves: list[Move]) -> bool:
    """Whether an element arrives in more than one part."""
    seen: list[Box] = []
    for part in sorted({move.part for move in moves}):
        mine = [move.box for move in moves if move.part == part]
        if any(box.intersect(other) for box in mine for other in seen):
            return True
        seen += mine
    return False
