"""Share: ranks of one shared-memory domain read each other's memory, without messages."""

from __future__ import annotations

from collections.abc import Sequence

from rvdcomm.layout import Box
from rvdcomm.planning.exchange import Move
from rvdcomm.program.memory import Arrival, LoweredMemory, PiecePlace
from rvdcomm.program.shards import DST, SRC


def publish(memory: LoweredMemory, moves: Sequence[Move], name: str) -> list[Arrival]:
    """Make the boxes of ``moves`` readable by other ranks; returns where the boxes lie.

    A shard is private to its rank. So its boxes are copied to a buffer ``name``, once for all
    readers. Boxes in staging memory, of the src rank or of another rank, are read where they lie.
    """
    wanted: dict[int, dict[Box, None]] = {}
    for move in moves:
        for place, box in memory.find(move.src_rank, move.box):
            if place.buffer in (SRC, DST):
                wanted.setdefault(move.src_rank, {})[box] = None
    published: dict[tuple[int, Box], PiecePlace] = {}
    for rank, boxes in sorted(wanted.items()):
        buffer = memory.add_buffer(name, rank, boxes)
        sources = [
            (place, common, i)
            for i, box in enumerate(boxes)
            for place, common in memory.find(rank, box)
        ]
        memory.copy("copy", rank, buffer.name, sources)
        for i, box in enumerate(boxes):
            published[rank, box] = PiecePlace(box, buffer.name, i, rank)
    return [
        Arrival(Move(move.src_rank, move.dst_rank, move.part, box), there)
        for move in moves
        for place, box in memory.find(move.src_rank, move.box)
        for there in (published.get((move.src_rank, box), place),)
    ]
