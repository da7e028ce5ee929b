"""Alpa's hierarchical planner: stages by a dynamic programme, ops of a stage by the intra-op one.

Objective: that of ``stages.alpa``, the time of a step of B microbatches,

    sum of t_i + (B - 1) max of t_i,

where t_i is the best time of a run of blocks on a submesh: over the logical meshes of the submesh,
over the cuts of the run's ops (``alpa_intra``), and over what its blocks keep. A way to run a stage
is allowed only if it has memory for the microbatches that the stages behind it make it keep.

Complexity: one priced space for every mesh; one solution for every mesh and every distinct run of
blocks; then that of ``alpa_stages``.

Differences from the published code:

- stages are priced, and not compiled and measured;
- repeated blocks of a stage are cut alike, so runs with the same numbers of equal blocks are solved
  once;
- blocks are clustered only if there are more than ``most_layers``. Clusters are as even in time as
  possible, and the bytes that cross a cut have no weight;
- a mesh of two axes covers those of one axis too, because both axes may cut the same dim;
- besides the fastest way of a run there are leaner ones, and ones with recomputation.

Source: Zheng et al., Alpa, OSDI 2022, sections 4 to 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations, product
from math import inf

import numpy as np

from superscaler_core.errors import PlanError
from superscaler_core.plan import Device, Keep
from superscaler_core.published.alpa.mesh_cut import MeshCut, MeshStage
from superscaler_core.published.alpa.ways import MeshWay, StagePrices
from superscaler_core.published.stages import Candidates, alpa_stages
from superscaler_core.published.stages.cut import devices_of_stages
from superscaler_core.space.choices import MeshSizes

MOST_LAYERS = 32
"""The most layers that are told apart: the dynamic programme's work grows with their square."""


def meshes_of(num_devices: int, per_host: int, num_axes: int = 2) -> tuple[MeshSizes, ...]:
    """Logical meshes of all submeshes: powers of two of a host's devices or of whole hosts.

    With two axes, a mesh whose sizes differ occurs in both orders. A mesh of two axes covers the
    mesh of one axis, so that occurs only for submeshes that cannot have two axes.

    >>> meshes_of(8, 8), meshes_of(8, 8, num_axes=1)
    (((1,), (2,), (2, 2), (2, 4), (4, 2)), ((1,), (2,), (4,), (8,)))
    >>> meshes_of(6, 3)
    ((1,), (2,), (3,), (2, 3), (3, 2))
    """
    inside = [1 << i for i in range(min(per_host, num_devices).bit_length())]
    hosts = [1 << i for i in range((num_devices // per_host).bit_length())]
    found: list[MeshSizes] = []
    for size in sorted({*inside, *(per_host * num for num in hosts)}):
        pairs = [(a, size // a) for a in range(2, size) if size % a == 0]
        found += pairs if pairs and num_axes > 1 else [(size,)]
    return tuple(found)


def clusters_of(secs: Sequence[float], most: int) -> tuple[int, ...]:
    """The ends of at most ``most`` runs into which blocks are cut; the last is their number.

    The longest time of a run is as short as possible. Among such cuts, the sum of the squared times
    is least.

    >>> clusters_of([1, 1, 1, 1, 1, 1], 3), clusters_of([1, 1, 4], 2)
    ((2, 4, 6), (2, 3))
    """
    num = len(secs)
    most = min(most, num)
    before = [0.0, *accumulate(secs)]
    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {(0, 0): (0.0, 0.0, ())}
    for count, end in product(range(1, most + 1), range(1, num + 1)):
        ways = [
            (max(top, run), squares + run**2, (*ends, end))
            for start in range(end)
            if (count - 1, start) in best
            for top, squares, ends in [best[count - 1, start]]
            for run in [before[end] - before[start]]
        ]
        if ways:
            best[count, end] = min(ways)
    return best[most, num][2]


def alpa_hierarchical(
    prices: Sequence[StagePrices],
    devices: Sequence[Device],
    microbatches: int,
    memory_bytes: float,
    *,
    levels: Iterable[Keep] = (Keep.EVERYTHING, Keep.BLOCK_INPUTS),
    most_layers: int = MOST_LAYERS,
) -> MeshCut:
    """The best stages on all devices.

    Args:
        prices: the prices for every mesh that a stage may have.
        devices: the devices, all of which are used.
        microbatches: microbatches in a step.
        memory_bytes: memory of a device.
        levels: what blocks may keep for the backward.
        most_layers: the most layers that are told apart; more blocks are clustered.

    Raises:
        PlanError: no cut fits in memory.
    """
    chosen, ends = tuple(levels), _ends(prices, most_layers)
    num = len(ends)
    pairs = list(combinations(range(num), 2))
    runs = [(ends[p], ends[q]) for p, q in pairs]
    ways: dict[tuple[int, int, int], tuple[MeshWay, ...]] = {
        (p, q, number): tuple(way for way in mine if way.keep in chosen)
        for number, each in enumerate(prices)
        if each.num_devices <= len(devices)
        for (p, q), mine in zip(pairs, each.ways_of(runs), strict=True)
    }
    slots = max(map(len, ways.values()), default=0)
    shape = num, num, len(prices) * slots
    secs, free, kept = np.full(shape, np.inf), np.full(shape, -1.0), np.zeros(shape)
    for (p, q, number), mine in ways.items():
        for slot, way in enumerate(mine):
            place = p, q, number * slots + slot
            secs[place], kept[place] = way.secs, way.kept_bytes
            free[place] = memory_bytes - way.resting_bytes - way.work_bytes
    sizes = tuple(each.num_devices for each in prices for _ in range(slots))
    points = tuple((1 << end) - 1 for end in ends)
    candidates = Candidates.within(points, sizes, secs, free, kept, microbatches)
    value, stages = alpa_stages(candidates, len(devices), microbatches)
    if not stages:
        raise no_cut(memory_bytes, len(devices))
    return placed(
        [
            (prices[c // slots], ends[p], ends[q], ways[p, q, c // slots][c % slots])
            for p, q, c in stages
        ],
        devices, microbatches, value,
    )  # fmt: skip


def no_cut(memory_bytes: float, num_devices: int) -> PlanError:
    """The error of a planner that finds no stages."""
    return PlanError(
        f"Alpa's hierarchical planner: no stages on {num_devices} devices fit in "
        f"{memory_bytes / 2**30:.1f} GiB; use more devices or smaller microbatches."
    )


def _ends(prices: Sequence[StagePrices], most_layers: int) -> tuple[int, ...]:
    """The blocks at which stages may begin and end."""
    num = len(prices[0].runs.layers)
    if num <= most_layers:
        return tuple(range(num + 1))
    alone = min(prices, key=lambda each: each.num_devices)
    layers = alone.ways_of([(i, i + 1) for i in range(num)])
    secs = [min((way.secs for way in ways), default=inf) for ways in layers]
    return (0, *clusters_of(secs, most_layers))


def placed(
    stages: Sequence[tuple[StagePrices, int, int, MeshWay]],
    devices: Sequence[Device],
    microbatches: int,
    objective: float,
) -> MeshCut:
    """The cut of stages on devices (``devices_of_stages``)."""
    mine = devices_of_stages([prices.num_devices for prices, *_ in stages], devices)
    return MeshCut(
        tuple(
            MeshStage(
                (start, end),
                chosen,
                prices.mesh,
                way.keep,
                prices.splits(start, end, way),
            )
            for chosen, (prices, start, end, way) in zip(mine, stages, strict=True)
        ),
        microbatches,
        objective,
        stages[0][0].recycle,
    )
