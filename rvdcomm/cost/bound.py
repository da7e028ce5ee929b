"""Bound: a lower bound on the cost of every plan, under the port model (derived in docs/bound.md).

A *home* is one group of a topology level: a rank, a host or a rack. Its ranks need some bytes that
none of them has, and these bytes must enter the home. Where parts are summed, each element needs a
minimum number of messages between homes. The time of a plan is at least the time that the busiest
port takes for these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from rvdcomm.cost.atoms import Atoms
from rvdcomm.cost.ports import Cost, PortSecs
from rvdcomm.layout import Box, Ints, Layout, Mask
from rvdcomm.network import Topology

MAX_MASK_ELEMENTS = 3 << 26
"""Largest mask of homes and atoms, in elements of a byte; larger pairs are bounded by boxes."""

MAX_BOXES_OF_A_HOME = 64
"""Most boxes of a home that are compared with each other."""


def lower_bound(src: Layout, dst: Layout, item_bytes: int, topology: Topology) -> Cost:
    """A lower bound on every field of the cost of any plan from ``src`` to ``dst``.

    ``secs`` and ``rounds`` contain one round of the farthest level that must be crossed. Most plans
    need more rounds, so with ``alpha_secs > 0`` no plan may reach the bound.
    """
    memory = {
        rank: sum(layout.placement.num_elements(rank) for layout in (src, dst))
        for rank in {*src.ranks, *dst.ranks}
    }
    bound = _level_bound_by_boxes
    if _num_mask_elements(src, dst) <= MAX_MASK_ELEMENTS:
        bound = partial(_level_bound, Atoms.of(src, dst))
    levels = [bound(src, dst, level, topology) for level in range(len(topology.levels))]
    return cost_of_levels(levels, max(memory.values()), item_bytes, topology)


@dataclass(frozen=True, slots=True)
class LevelBound:
    """Lower bounds on the elements that any plan moves through the ports of one level.

    Attributes:
        busiest: elements through the busiest port, in its busier direction.
        busiest_in: elements into the busiest port.
        total: elements into all ports together.
    """

    busiest: int
    busiest_in: int
    total: int

    @classmethod
    def of(cls, into: Ints, out_of: Ints, messages: int, num_homes: int) -> LevelBound:
        """The bounds, given the elements that must enter and leave each home, and all messages."""
        # Even if the messages are spread over all ports, the busiest port carries the average.
        busiest_in = max(int(into.max()), -(-messages // num_homes))
        total = max(messages, int(into.sum()), int(out_of.sum()))
        return cls(max(busiest_in, int(out_of.max())), busiest_in, total)


def cost_of_levels(
    levels: Sequence[LevelBound], peak_elements: int, item_bytes: int, topology: Topology
) -> Cost:
    """The bound as a cost, from the bounds of all levels."""
    port_bytes = [bound.busiest * item_bytes for bound in levels]
    return Cost(
        secs=PortSecs.of(topology).least(port_bytes, latency=0.0),
        wire_bytes=levels[0].total * item_bytes,
        host_bytes=levels[1].total * item_bytes if len(levels) > 1 else 0,
        peak_bytes=peak_elements * item_bytes,
        rounds=int(any(port_bytes)),
        recv_bytes=levels[0].busiest_in * item_bytes,
    )


def _num_mask_elements(src: Layout, dst: Layout) -> int:
    """The size of the larger mask of homes and atoms, if every rank is a home."""
    num_atoms = prod(len({*a, *b}) for a, b in zip(src.cuts, dst.cuts, strict=True))
    return num_atoms * len({*src.ranks, *dst.ranks}) * max(src.rvd.v, dst.rvd.v)


def _level_bound_by_boxes(src: Layout, dst: Layout, level: int, topology: Topology) -> LevelBound:
    """A weaker bound in time linear in the ranks: each home needs at least what one rank needs.

    Of a rank's dst box, what the src boxes of its home do not overlap has to enter the home. Boxes
    may overlap each other, which only lowers the bound (docs/bound.md, "By boxes").
    """
    members: dict[int, list[int]] = {}
    for rank in sorted({*src.ranks, *dst.ranks}):
        members.setdefault(topology.homes[level][rank], []).append(rank)
    into = np.zeros(len(members), dtype=np.int64)
    for home, ranks in enumerate(members.values() if dst.rvd.v == 1 else ()):
        if len(ranks) > MAX_BOXES_OF_A_HOME:
            continue
        has = [src.cell(rank).box for rank in ranks if rank in src]
        wants = [dst.cell(rank).box for rank in ranks if rank in dst]
        into[home] = max((_missing(box, has) for box in wants), default=0)
    return LevelBound.of(into, np.zeros_like(into), 0, len(members))


def _missing(box: Box, has: Sequence[Box]) -> int:
    """The elements of a box that no box of ``has`` overlaps, at least."""
    common = [box.intersect(other) for other in has]
    held = sum(inside.num_elements for inside in common if inside is not None)
    return max(0, box.num_elements - held)


def _level_bound(
    atoms: Atoms, src: Layout, dst: Layout, level: int, topology: Topology
) -> LevelBound:
    used = sorted({topology.homes[level][rank] for rank in (*src.ranks, *dst.ranks)})
    renumber = {home: i for i, home in enumerate(used)}
    homes = {rank: renumber[topology.homes[level][rank]] for rank in (*src.ranks, *dst.ranks)}
    has = atoms.masks(src.placement, homes, len(used))
    wants = atoms.masks(dst.placement, homes, len(used))
    into = _into(has, wants) @ atoms.sizes
    out_of = _out_of(has, wants) @ atoms.sizes
    messages = int(_messages(has, wants) @ atoms.sizes)
    return LevelBound.of(into, out_of, messages, len(used))


def _into(has: Mask, wants: Mask) -> Ints:
    """[homes, atoms]: 1 where an element must enter a home."""
    if wants.shape[0] > 1:
        # Each src part may go to any part of dst, so no single home must be entered.
        return np.zeros(has.shape[1:], dtype=np.int64)
    missing: Ints = (wants[0] & ~has.all(axis=0)).astype(np.int64)
    return missing


def _out_of(has: Mask, wants: Mask) -> Ints:
    """[homes, atoms]: 1 where an element must leave a home: only this home has one of its parts."""
    if wants.shape[0] > 1:
        return np.zeros(has.shape[1:], dtype=np.int64)
    alone = (has & (has.sum(axis=1, keepdims=True) == 1)).any(axis=0)
    wanted_elsewhere = wants[0].sum(axis=0)[None] - wants[0] > 0
    leaving: Ints = (alone & wanted_elsewhere).astype(np.int64)
    return leaving


def _messages(has: Mask, wants: Mask) -> Ints:
    """[atoms]: a lower bound on the messages between homes for one element."""
    num_src_parts, num_dst_parts = has.shape[0], wants.shape[0]
    if num_src_parts == 1:
        # Some part of dst takes the element, and each of its holders must have it.
        missing: Ints = (wants & ~has[0][None]).sum(axis=1).min(axis=0)
        return missing
    # No home has more than `brought` parts, so at least `meeting` homes must join their parts.
    brought = np.maximum(has.sum(axis=0).max(axis=0), 1)
    meeting: Ints = -(-num_src_parts // brought)
    if num_dst_parts > 1:
        merged: Ints = np.maximum(meeting - num_dst_parts, 0)
        return merged
    readers = wants[0].sum(axis=0)
    complete = has.all(axis=0)
    apart = ~(has.any(axis=0) & wants[0]).any(axis=0)
    summed: Ints = meeting - 1 + readers - 1 + apart
    # If some home has all parts from the start, each other home that wants the element and lacks a
    # part needs one message, and no other message is certain.
    needed: Ints = np.where(complete.any(axis=0), (wants[0] & ~complete).sum(axis=0), summed)
    return needed
