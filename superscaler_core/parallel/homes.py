"""Homes: decisions by which every program of a model stores parameters as the first one does."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product

import rvdcomm as rv
from superscaler_core.graph.graph import Graph
from superscaler_core.grouped import grouped
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.plan import PlacedPart, Plan


def on_one_device(graph: Graph) -> Plan:
    """A plan that computes all ops on device 0."""
    plan = Plan(graph, [0])
    for op in graph.ops:
        plan.op_assign(op, 0)
    return plan


def _pieces(box: rv.Box, others: Iterable[rv.Box]) -> list[rv.Box]:
    """A box cut wherever one that overlaps it begins or ends."""
    near = [other for other in others if other != box and box.overlaps(other)]
    ends = [
        sorted({lo, hi, *(x for o in near for x in (o.lo[i], o.hi[i]) if lo < x < hi)})
        for i, (lo, hi) in enumerate(zip(box.lo, box.hi, strict=True))
    ]
    found = []
    for each in product(*map(pairwise, ends)):
        lo, hi = zip(*each, strict=True) if each else ((), ())
        found.append(rv.Box(lo, hi))
    return found


def placed(storage: Sharding) -> tuple[PlacedPart, ...]:
    """The parts of an optimizer's op by which a parameter is stored like this.

    Where a device stores some of what another one stores, as of a tied embedding, boxes are cut
    into pieces that are equal or apart.
    """
    boxes = {device: shard.box for device, shard in sorted(storage.shards.items())}
    cut = {box: _pieces(box, boxes.values()) for box in {*boxes.values()}}
    holders = grouped((piece, device) for device, box in boxes.items() for piece in cut[box])
    found = []
    for box, devices in holders.items():
        ends = enumerate(zip(box.lo, box.hi, strict=True))
        pieces = tuple((f"d{i}", lo, hi) for i, (lo, hi) in ends)
        found += [PlacedPart(pieces, i, device) for i, device in enumerate(devices)]
    return tuple(found)
