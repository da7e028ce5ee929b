"""Tarnawski et al.'s splits of a graph of layers by integer programming.

Objective: the load of the most loaded device, in seconds per microbatch. Every layer runs on one
device. The load of a device is the computation of its layers plus the transfers of all results that
enter or leave this set of layers, forward and backward.

``tarnawski`` finds contiguous splits: the layers of a device are the difference of two downsets, so
the devices form a pipeline. Under a limit on the load, a binary variable says for every allowed set
whether it is a stage; a split is a path from the empty set to all layers. ``tarnawski_scattered``
lets a device have any set of layers, with a binary variable x for every layer and device; a
transfer is at least x of one end minus x of the other. HiGHS solves both, through scipy.

Complexity: exponential in the worst case. The contiguous programme is a flow with an integral
relaxation, so it needs no branching; a binary search over limits on the load solves one for each
limit that it tries. The scattered programme branches. The contiguous split gives it an upper bound,
if it fits; after ``limit_secs``, the best split known is returned.

Differences from the published code: that has x and an auxiliary variable for every layer and device
in the contiguous case too. It accepts sets that are contiguous one by one, even if two devices need
each other's results; here the contiguous programme is over sets of layers. A contiguous stage keeps
as many microbatches as there are stages from it to the last; a device of a scattered split keeps as
many as there are devices. Devices are ordered by their first layers, so that equal splits are not
tried again.

Source: Tarnawski, Phanishayee, Devanur, Mahajan, Paravecino, NeurIPS 2020.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from superscaler_core.errors import PlanError
from superscaler_core.integer_program import IntegerProgram
from superscaler_core.published.stages.candidates import Candidates
from superscaler_core.published.stages.chains import Chosen
from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.degrees import Degrees
from superscaler_core.published.stages.points import downsets
from superscaler_core.published.stages.problem import Array, StageProblem

ALONE = Degrees(1, 1)


def tarnawski(problem: StageProblem) -> StageCut:
    """Cut a graph of layers into contiguous stages of one device; the largest load is least.

    Raises:
        PlanError: no cut fits in memory, or the graph has too many downsets.
    """
    candidates = Candidates.of(problem.with_degrees([ALONE]), downsets(problem))
    load = candidates.secs[:, :, 0] + np.vectorize(problem.transfer_secs)(
        sum(candidates.crossing_bytes(problem))
    )
    limits = np.unique(load[np.isfinite(load)])
    known: dict[int, list[Chosen]] = {}

    def has_path(number: int) -> bool:
        known[number] = _path(candidates, load <= limits[number], problem.num_devices)
        return bool(known[number])

    # The search starts at the mean load: good limits are near it, and higher ones allow many more
    # sets.
    mean = float(problem.with_degrees([ALONE]).table("secs").sum()) / problem.num_devices
    low = int(np.searchsorted(limits, mean * (1 - 1e-9)))
    step = 1
    while low + step <= len(limits) and not has_path(low + step - 1):
        low, step = low + step, 2 * step
    high = min(low + step - 1, len(limits) - 1)
    best = bisect_left(range(high + 1), True, lo=low, key=has_path) if len(limits) else 0
    if best >= len(limits) or not known.get(best):
        raise problem.no_cut("Tarnawski et al.'s contiguous split")
    stages = [(candidates.layers(p, q), ALONE) for p, q, _ in known[best]]
    return problem.placed(stages, float(limits[best]))


def _path(candidates: Candidates, may_be: NDArray[np.bool_], most_stages: int) -> list[Chosen]:
    """A path with the fewest stages from the first point to the last; empty if these are too many.

    A node is a point and the number of stages from there to the end, as far as memory tells numbers
    apart.
    """
    last = len(candidates.points) - 1
    most_behind = candidates.most_behind[:, :, 0]
    limits = most_behind[may_be]
    levels = min(int(limits[limits < most_stages - 1].max(initial=-1)) + 2, most_stages)
    arcs = [
        (level, p, before, q)
        for p, q in np.argwhere(may_be).tolist()
        for level in range(1, min(levels, most_behind[p, q] + 1) + 1)
        for before in ((level - 1, level) if level == levels else (level - 1,))
        if (before == 0) == (q == last)
    ]
    program = IntegerProgram()
    program.variables(len(arcs), cost=1.0, is_whole=True, most=1.0)
    # As much flow leaves a node as enters it. All nodes of the first point are one, because a path
    # may have any number of stages.
    flow: dict[tuple[int, int], list[tuple[int, float]]] = {(0, 0): [], (0, last): []}
    for number, (level, p, before, q) in enumerate(arcs):
        flow.setdefault((level if p else 0, p), []).append((number, 1.0))
        flow.setdefault((before, q), []).append((number, -1.0))
    for node, entries in flow.items():
        leaves = {(0, 0): 1.0, (0, last): -1.0}.get(node, 0.0)
        program.row(entries, least=leaves, most=leaves)
    found = program.solve() if arcs else None
    if found is None or found.values.sum() > most_stages + 0.5:
        return []
    chosen = (arc for arc, x in zip(arcs, found.values, strict=True) if x > 0.5)
    # Points are sorted by their number of layers.
    return sorted((p, q, 0) for _, p, _, q in chosen)


def tarnawski_scattered(problem: StageProblem, *, limit_secs: float = 60.0) -> StageCut:
    """Give every layer of a graph to a device, so that the largest load is least.

    Args:
        problem: the problem; only its degrees 1x1 are used.
        limit_secs: time limit of HiGHS in seconds; the best split known then counts.

    Raises:
        PlanError: no split fits in memory, or none was found in time.
    """
    try:
        known = tarnawski(problem)
    except PlanError:
        known = None
    if known is not None and not _fits_scattered(problem, known):
        known = None
    program = IntegerProgram()
    # Loads are in units of all computation, because HiGHS has a tolerance of some 1e-6.
    total = float(problem.with_degrees([ALONE]).table("secs").sum())
    bound = np.inf if known is None else known.objective / total * (1 + 1e-6)
    (most,) = program.variables(1, cost=1.0, most=bound).tolist()
    num, devices = len(problem.layers), min(problem.num_devices, len(problem.layers))
    has = program.variables(num * devices, is_whole=True, most=1.0).reshape(num, devices)
    for of_devices in has:
        program.row([(x, 1.0) for x in of_devices], least=1.0, most=1.0)
    for i, mine in enumerate(has.T):
        _add_load(program, problem, mine, most, total)
        if isfinite(problem.memory_bytes):
            _add_memory(program, problem, mine)
        # The first layer of a device comes after the first layer of the device before it.
        for layer in range(num if i else 0):
            earlier = [(x, -1.0) for x in has[:layer, i - 1].tolist()]
            program.row([(int(mine[layer]), 1.0), *earlier], most=0.0)
    found = program.solve(limit_secs)
    if found is None and known is None:
        raise problem.no_cut("Tarnawski et al.'s scattered split")
    if known is not None and found is None:
        return known
    assert found is not None
    owners = found.values[has].argmax(axis=1)
    sets = [tuple(np.flatnonzero(owners == i).tolist()) for i in range(devices)]
    stages = [layers for layers in sets if layers]
    largest = max(_load(problem, layers) for layers in stages)
    return problem.placed([(layers, ALONE) for layers in stages], largest)


def _load(problem: StageProblem, layers: Sequence[int]) -> float:
    """Load of a device with these layers, in seconds per microbatch."""
    secs = problem.with_degrees([ALONE]).table("secs")[list(layers), 0]
    crossing = problem.crossing_bytes(sum(1 << layer for layer in layers))
    return float(secs.sum()) + problem.transfer_secs(sum(crossing))


def _add_load(
    program: IntegerProgram,
    problem: StageProblem,
    mine: NDArray[np.int64],
    most: int,
    unit_secs: float,
) -> None:
    """Add rows: the load of a device, whose layers ``mine`` says, is at most ``most``."""
    secs = problem.with_degrees([ALONE]).table("secs")[:, 0] / unit_secs
    load = [(most, -1.0), *zip(mine, secs, strict=True)]
    for writer, layer in enumerate(problem.layers):
        readers = [b for a, b in problem.edges if a == writer]
        moved = problem.transfer_secs(layer.out_bytes) / unit_secs
        if readers and moved:
            enters, leaves = program.variables(2, most=1.0).tolist()
            load += [(enters, moved), (leaves, moved)]
            for reader in readers:
                # At least 1 if one end is on this device and the other is not.
                ends = [(enters, mine[reader], mine[writer]), (leaves, mine[writer], mine[reader])]
                for moves, here, there in ends:
                    program.row([(moves, -1.0), (here, 1.0), (there, -1.0)], most=0.0)
    program.row(load, most=0.0)


def _add_memory(program: IntegerProgram, problem: StageProblem, mine: NDArray[np.int64]) -> None:
    """Add rows: a device has memory for its layers, and for the largest work memory of one."""
    held, work = _scattered_bytes(problem) / problem.memory_bytes
    (largest,) = program.variables(1).tolist()
    program.row([(largest, 1.0), *zip(mine, held, strict=True)], most=1.0)
    for x, need in zip(mine, work, strict=True):
        program.row([(x, need), (largest, -1.0)], most=0.0)


def _scattered_bytes(problem: StageProblem) -> Array:
    """Bytes that every layer holds, and needs in addition while it runs: ``[2, layer]``."""
    alone = problem.with_degrees([ALONE])
    rest, kept, work = (
        alone.table(name)[:, 0] for name in ("resting_bytes", "kept_bytes", "work_bytes")
    )
    return np.array([rest + min(problem.num_devices, problem.microbatches) * kept, work])


def _fits_scattered(problem: StageProblem, cut: StageCut) -> bool:
    held, work = _scattered_bytes(problem)
    layers = [list(stage.layers) for stage in cut.stages]
    return all(held[own].sum() + work[own].max() <= problem.memory_bytes for own in layers)
