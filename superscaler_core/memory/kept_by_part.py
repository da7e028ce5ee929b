"""Kept by part: an estimate of what each part of a segment keeps, and of what it handles.

``footprint`` measures a segment as a whole: its peak, and what it leaves. These estimates say where
inside the segment the memory grows.
"""

from __future__ import annotations

from typing import NamedTuple

import rvdcomm as rv
from superscaler_core.graph.tensor import ITEM_BYTES, PTensor, VTensor
from superscaler_core.materialize.segments import Segment
from superscaler_core.memory.held import VIEWS, saved_by

Storage = tuple[PTensor, rv.Box]


class PartMemory(NamedTuple):
    """The memory of one part.

    Attributes:
        kept_bytes: what it makes and the segment keeps for its backward or gives away.
        handled_bytes: all that it reads and writes, besides parameters.
    """

    kept_bytes: int
    handled_bytes: int


def memory_by_part(segment: Segment) -> list[PartMemory]:
    """The memory of every part of a segment, in order."""
    source: dict[Storage, Storage] = {}
    for part in segment.parts:
        if part.op.kind in VIEWS:
            shown = _source(source, part.inputs[0])
            source |= {(out.tensor, out.box): shown for out in part.outputs}
    inside = {tensor for part in segment.parts for tensor in part.op.inputs}
    kept = {
        _source(source, view)
        for part in segment.parts
        for view, mask_bytes in saved_by(part)
        if mask_bytes is None
    }
    kept |= {
        _source(source, out)
        for part in segment.parts
        for out in part.outputs
        if out.tensor not in inside
    }
    found = []
    for part in segment.parts:
        masks = sum(
            view.box.num_elements * item_bytes
            for view, item_bytes in saved_by(part)
            if item_bytes is not None
        )
        mine = {(out.tensor, out.box) for out in part.outputs} & kept
        # A view makes no memory of its own.
        made = 0 if part.op.kind in VIEWS else sum(map(_num_bytes, mine))
        handled = {(v.tensor, v.box) for v in (*part.inputs, *part.outputs)}
        handled_bytes = sum(_num_bytes(each) for each in handled if each[0].kind != "parameter")
        found.append(PartMemory(made + masks, handled_bytes))
    return found


def _source(source: dict[Storage, Storage], view: VTensor) -> Storage:
    storage = view.tensor, view.box
    return source.get(storage, storage)


def _num_bytes(storage: Storage) -> int:
    tensor, box = storage
    return box.num_elements * ITEM_BYTES[tensor.dtype]
