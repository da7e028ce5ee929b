"""Lowering: from a path to a program, fusing what needs no memory traffic of its own.

While it walks the steps, the lowering knows for every rank *where* each region of the current state
lies (``memory.py``). So a slice is free, an unpack merges with the next pack, contiguous pieces are
sent and received in place (``call.py``), and a state is written out only where parts are added or
where it is ``dst``. With ``fuse=False`` every step packs, sends and unpacks: the plain meaning, for
tests to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable

from rvdcomm.box import Box
from rvdcomm.dtypes import SUMMED_BY_BACKENDS
from rvdcomm.exchange import Move
from rvdcomm.lower.call import Call, Target, components
from rvdcomm.lower.memory import Arrival, Memory, Place
from rvdcomm.lower.regions import is_filled, window
from rvdcomm.path import Path, State, Step
from rvdcomm.program import DST, SRC, Collective, Entry, Message, Program
from rvdcomm.topology import Topology

__all__ = ["lower"]


def lower(path: Path, dtype: str, topology: Topology, *, fuse: bool = True) -> Program:
    """The program that runs ``path`` on tensors of ``dtype``.

    Law (tests/test_lower.py): it verifies, and gives the same data with and without ``fuse``.
    """
    memory = Memory()
    for name, layout in ((SRC, path.src), (DST, path.dst)):
        for rank in sorted(layout.ranks):
            memory.add_buffer(name, rank, (layout.cell(rank).box,))
    for rank in path.src.ranks:
        memory.settle(SRC, rank, (path.src.cell(rank).box,))
    for index, step in enumerate(path.steps):
        is_last = index == len(path.steps) - 1
        if step.kind == "all_reduce" and _backend_may_sum(step, dtype):
            _lower_all_reduce(memory, index, step, is_last)
            continue
        legs = list(zip(step.legs, step.moves(topology), strict=True))
        for i, ((_, state), moves) in enumerate(legs, start=1):
            is_dst = is_last and i == len(legs)
            target = _target(memory, state, moves, is_dst, fuse and step.num_slices == 1)
            run = _lower_leg if step.num_slices == 1 else _lower_windows
            run(memory, index, step, moves, target, fuse)
    for rank in path.dst.ranks:
        _finish(memory, rank)
    return Program(
        path.src, path.dst, dtype, tuple(memory.buffers.values()), tuple(memory.instructions)
    )


def _target(
    memory: Memory, state: State, moves: tuple[Move, ...], is_dst: bool, in_place: bool
) -> Target:
    holdings = state.placement.by_rank
    arriving: dict[int, list[Move]] = {rank: [] for rank in holdings}
    for move in moves:
        arriving[move.dst_rank].append(move)
    needs_sum = {rank: _has_sum(found) for rank, found in arriving.items()}
    return Target(DST if is_dst else memory.new_name("x"), holdings, needs_sum, in_place)


def _has_sum(moves: list[Move]) -> bool:
    """Whether an element arrives in more than one part."""
    seen: list[Box] = []
    for part in sorted({move.part for move in moves}):
        mine = [move.box for move in moves if move.part == part]
        if any(box.intersect(other) for box in mine for other in seen):
            return True
        seen += mine
    return False


def _lower_leg(
    memory: Memory, index: int, step: Step, moves: tuple[Move, ...], target: Target, fuse: bool
) -> None:
    """Move the current state to the target, and write it out on ranks that must."""
    arrivals = _arrivals(memory, index, moves, target, fuse)
    where: dict[int, list[Place]] = {}
    for rank, holding in target.holdings.items():
        mine = arrivals.get(rank, [])
        boxes = [arrival.move.box for arrival in mine]
        is_whole = fuse and not target.needs_sum[rank] and is_filled(holding.boxes, boxes)
        if is_whole and any(arrival.place.buffer != target.name for arrival in mine):
            where[rank] = [Place(a.move.box, a.place.buffer, a.place.piece) for a in mine]
            continue
        if not is_whole:
            buffer = memory.add_buffer(target.name, rank, holding.boxes)
            memory.accumulate(rank, buffer, mine, written=[])
            memory.zero_rest(rank, buffer, boxes)
        where[rank] = [Place(box, target.name, i) for i, box in enumerate(holding.boxes)]
    memory.where = where


def _arrivals(
    memory: Memory, index: int, moves: Iterable[Move], target: Target, fuse: bool
) -> dict[int, list[Arrival]]:
    """Emit a call for every group that exchanges something; where all boxes lie then, by rank."""
    by_rank: dict[int, list[Arrival]] = {}
    for group, members in components(moves):
        if len(group) > 1:
            found = Call(memory, target, group, tuple(members), fuse).emit(index)
        else:
            found = memory.arrivals_at_home(members)
        for arrival in found:
            by_rank.setdefault(arrival.move.dst_rank, []).append(arrival)
    return by_rank


def _lower_windows(
    memory: Memory, index: int, step: Step, moves: tuple[Move, ...], target: Target, fuse: bool
) -> None:
    """An exchange in windows: each sends one slice of every move, then frees its staging.

    Part by part, so that sums keep their order of parts whatever the windows are.
    """
    written: dict[int, list[Box]] = {rank: [] for rank in target.holdings}
    for part in sorted({move.part for move in moves}):
        mine = [move for move in moves if move.part == part]
        for i in range(step.num_slices):
            sliced = [
                Move(m.src_rank, m.dst_rank, m.part, box)
                for m in mine
                for box in window(m.box, i, step.num_slices)
            ]
            for rank, found in sorted(_arrivals(memory, index, sliced, target, fuse).items()):
                buffer = memory.add_buffer(target.name, rank, target.boxes(rank))
                memory.accumulate(rank, buffer, found, written[rank])
    memory.where = {}
    for rank, holding in target.holdings.items():
        buffer = memory.add_buffer(target.name, rank, holding.boxes)
        memory.zero_rest(rank, buffer, written[rank])
        memory.settle(target.name, rank, holding.boxes)


def _backend_may_sum(step: Step, dtype: str) -> bool:
    """Whether the backend's all_reduce keeps our promise of equal bits on all replicas.

    A backend sums in its own fixed order of ranks: where the order of ranks is the order of parts
    in every group, equal parts are summed in equal order in all of them.
    """
    part = {rank: h.part for rank, h in step.src.placement.by_rank.items()}
    return dtype in SUMMED_BY_BACKENDS and all(
        [part[rank] for rank in group] == sorted({part[rank] for rank in group})
        for group in step.groups
    )


def _lower_all_reduce(memory: Memory, index: int, step: Step, is_last: bool) -> None:
    """Copy the shard to where the result goes, and let the backend sum in place."""
    name = DST if is_last else memory.new_name("x")
    shards = step.dst.placement.by_rank
    for group in step.groups:
        messages = []
        for rank in group:
            buffer = memory.add_buffer(name, rank, shards[rank].boxes)
            memory.copy_shard(rank, buffer)
            whole = tuple(Entry(box, i, i) for i, box in enumerate(shards[rank].boxes))
            messages.append(Message(rank, rank, whole))
        names = (name,) * len(group)
        if messages[0].num_elements:
            memory.instructions.append(
                Collective("all_reduce", index, group, names, names, tuple(messages))
            )
    for rank, holding in shards.items():
        memory.settle(name, rank, holding.boxes)


def _finish(memory: Memory, rank: int) -> None:
    """Copy what does not lie in dst yet, and zero what no part came for."""
    buffer = memory.buffers[DST, rank]
    memory.copy_shard(rank, buffer)
    memory.zero_rest(rank, buffer, [place.box for place in memory.where.get(rank, [])])
