"""Transfers: move a tensor from its writers to its readers, as rvdcomm plans.

If the shards of both ends form layouts, the tensor moves as a whole. Otherwise it is cut at every
boundary of a shard, and every cell moves from its holders to its readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.plan import Device

MAX_TRANSFERS = 1 << 16
"""Bound on cached pairs of ends with their transfers."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A region of a tensor that moves between two layouts of the region.

    Attributes:
        box: the region.
        src, dst: layouts over devices; their shape is the shape of the region.
        dtype: dtype of the moved elements.
    """

    box: rv.Box
    src: rv.Layout
    dst: rv.Layout
    dtype: str

    def plan(self, topology: rv.Topology | None = None) -> rv.Plan:
        """The low-cost rvdcomm plan of the move."""
        return rv.plan(self.src, self.dst, self.dtype, topology, executor="dist", trees=False)

    def of_dtype(self, dtype: str) -> Transfer:
        """The same transfer with elements of another dtype."""
        return self if dtype == self.dtype else Transfer(self.box, self.src, self.dst, dtype)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices that take part."""
        return tuple(sorted({*self.src.ranks, *self.dst.ranks}))

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves, because every reader holds its shard already."""
        return self.src == self.dst


@lru_cache(maxsize=MAX_TRANSFERS)
def transfers(
    src: Sharding, dst: Sharding, shape: tuple[int, ...], dtype: str
) -> tuple[Transfer, ...]:
    """The transfers that bring the value written at ``src`` to all boxes that ``dst`` reads.

    Raises:
        PlanError: summands overlap, so that no sum of the devices' shards is the value.
    """
    wants = {device: shard.box for device, shard in dst.shards.items()}
    whole = rv.Box.of_shape(shape)
    src_layout = _src_layout(whole, src)
    dst_layout = _dst_layout(whole, dst)
    if src_layout is not None and dst_layout is not None:
        return (Transfer(whole, src_layout, dst_layout, dtype),)
    found = []
    for cell in _cells(shape, src, wants.values()):
        readers = sorted(device for device, box in wants.items() if box.contains(cell))
        if readers:
            made = _cell_layouts(cell, src, readers)
            found.append(Transfer(cell, *made, dtype))
    return _in_rounds(found)


def _in_rounds(found: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Order the transfers in rounds, so that transfers of disjoint devices run at the same time.

    A device runs its transfers one after another. Without rounds, a chain of neighbours would run
    them one at a time.
    """
    rounds: list[tuple[set[Device], list[Transfer]]] = []
    for transfer in found:
        devices = () if transfer.is_idle else transfer.devices
        free = next((one for one in rounds if one[0].isdisjoint(devices)), None)
        if free is None:
            free = set(), []
            rounds.append(free)
        free[0].update(devices)
        free[1].append(transfer)
    return tuple(transfer for _, together in rounds for transfer in together)


# --- one layout ---------------------------------------------------------------------------------


@lru_cache(maxsize=MAX_TRANSFERS)
def _src_layout(whole: rv.Box, src: Sharding) -> rv.Layout | None:
    """The layout of the written tensor, if its shards form one."""
    holders: dict[rv.Box, dict[frozenset[tuple[rv.Box, int]], list[Device]]] = {}
    for device, shard in src.shards.items():
        holders.setdefault(shard.box, {}).setdefault(shard.held, []).append(device)
    for box, by_held in holders.items():
        # Distinct shards are parts of the sum if together they hold every summand exactly once.
        inside = {(part, k) for part, k in src.held if part.intersect(box) or part == box}
        if sum(map(len, by_held)) != len(inside) or set().union(*by_held) != inside:
            return None
    parts = {box: [sorted(ranks) for ranks in by_held.values()] for box, by_held in holders.items()}
    return _layout(whole, {box: sorted(ranks) for box, ranks in parts.items()})


@lru_cache(maxsize=MAX_TRANSFERS)
def _dst_layout(whole: rv.Box, dst: Sharding) -> rv.Layout | None:
    """The layout of the reads, if their boxes form one."""
    readers: dict[rv.Box, list[Device]] = {}
    for device, shard in dst.shards.items():
        readers.setdefault(shard.box, []).append(device)
    return _layout(whole, {box: [sorted(devices)] for box, devices in readers.items()})


def _layout(whole: rv.Box, parts: Mapping[rv.Box, Sequence[Sequence[Device]]]) -> rv.Layout | None:
    """The layout of ``box -> [replicas of every part]``, if boxes form a grid of equal counts."""
    num_parts = {len(found) for found in parts.values()}
    num_replicas = {len(replicas) for found in parts.values() for replicas in found}
    cuts = _grid(whole, parts)
    if cuts is None or len(num_parts) != 1 or len(num_replicas) != 1:
        return None
    counts = [len(cut) - 1 for cut in cuts]
    boxes = [
        rv.Box(tuple(lo for lo, _ in index), tuple(hi for _, hi in index))
        for index in product(*(list(pairwise(cut)) for cut in cuts))
    ]
    v, r = num_parts.pop(), num_replicas.pop()
    ranks = [
        parts[box][part][replica] for replica in range(r) for part in range(v) for box in boxes
    ]
    rvd = f"R({r})V({v})D({','.join(map(str, counts))})"
    return rv.Layout(whole.shape, rvd, ranks, cuts)


def _grid(whole: rv.Box, boxes: Iterable[rv.Box]) -> list[tuple[int, ...]] | None:
    """The cut points of a grid of boxes; None if the boxes do not form a grid."""
    given = list(boxes)
    cuts, count = [], 1
    for dim, size in enumerate(whole.shape):
        ranges = sorted({(box.lo[dim], box.hi[dim]) for box in given})
        if ranges[0][0] != 0 or ranges[-1][1] != size or size == 0:
            return None
        if any(a[1] != b[0] for a, b in pairwise(ranges)):
            return None
        cuts.append((*(lo for lo, _ in ranges), size))
        count *= len(ranges)
    return cuts if count == len(given) else None


# --- cells --------------------------------------------------------------------------------------


def _cells(shape: tuple[int, ...], src: Sharding, wants: Iterable[rv.Box]) -> Iterable[rv.Box]:
    """The cells into which the boundaries of all shards cut the tensor."""
    boxes = [view.box for view in src.views] + list(wants)
    ranges = []
    for dim, size in enumerate(shape):
        points = {0, size} | {box.lo[dim] for box in boxes} | {box.hi[dim] for box in boxes}
        ranges.append(list(pairwise(sorted(points))))
    for index in product(*ranges):
        yield rv.Box(tuple(lo for lo, _ in index), tuple(hi for _, hi in index))


def _cell_layouts(
    cell: rv.Box, src: Sharding, readers: Sequence[Device]
) -> tuple[rv.Layout, rv.Layout]:
    holders: dict[frozenset[int], list[Device]] = {}
    for device, shard in sorted(src.shards.items()):
        held = shard.summands_at(cell)
        if held:
            holders.setdefault(held, []).append(device)
    needed = src.summands_at(cell)
    chosen = _exact_cover(holders, needed)
    if chosen is None:
        sums = ", ".join(
            f"{'+'.join(map(str, sorted(held)))} on {devices}" for held, devices in holders.items()
        )
        raise PlanError(
            f"region {cell} is the sum of {len(needed)} summands, and devices hold sums of them "
            f"that do not make the whole: {sums}; put parts of one sum on distinct devices."
        )
    r = min(len(holders[held]) for held in chosen)
    ranks = [_near(holders[held], readers)[i] for i in range(r) for held in chosen]
    ones = ",".join("1" * len(cell.shape))
    return (
        rv.Layout(cell.shape, f"R({r})V({len(chosen)})D({ones})", ranks),
        rv.Layout(cell.shape, f"R({len(readers)})V(1)D({ones})", readers),
    )


def _near(holders: Sequence[Device], readers: Sequence[Device]) -> list[Device]:
    """The holders, with those that are readers first: their shards need not move."""
    return sorted(holders, key=lambda device: (device not in readers, device))


def _exact_cover(
    holders: Mapping[frozenset[int], list[Device]], needed: frozenset[int]
) -> list[frozenset[int]] | None:
    """Disjoint sets of summands that add up to the whole, chosen greedily: the largest first."""
    chosen: list[frozenset[int]] = []
    left = set(needed)
    for held in sorted(holders, key=lambda held: (-len(held), sorted(held))):
        if held <= left:
            chosen.append(held)
            left -= held
    return None if left else chosen
