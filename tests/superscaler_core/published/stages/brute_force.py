"""All cuts of a small stage problem, and the cost of a cut as each planner's paper defines it.

These definitions share little code with the planners: ``StageProblem`` with its memory limit, the
points where a model can be cut, and the memory units of Galvatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product

from superscaler_core.published.stages import Degrees, PlacedStage, StageCut, StageProblem
from superscaler_core.published.stages.points import downsets, prefixes

Stages = list[tuple[tuple[int, ...], Degrees]]
Objective = Callable[[StageProblem, StageCut], float]


def members(bits: int) -> tuple[int, ...]:
    return tuple(i for i in range(bits.bit_length()) if bits >> i & 1)


def chains(points: tuple[int, ...], start: int = 0) -> Iterator[list[tuple[int, ...]]]:
    """All paths from the point ``start`` to the last point.

    A point is a set of layers, as bits. A path is a list of the sets of layers between its points.
    """
    if start == points[-1]:
        yield []
    for point in points:
        if point != start and point & start == start:
            for rest in chains(points, point):
                yield [members(point & ~start), *rest]


def cuts(
    problem: StageProblem, *, is_graph: bool = False, replicas_only: bool = False
) -> Iterator[StageCut]:
    """All cuts that fit into memory, with all degrees and all numbers of devices."""
    chosen = [d for d in problem.degrees if d.tensor == 1 or not replicas_only]
    for sets in chains((downsets if is_graph else prefixes)(problem)):
        for degrees in product(chosen, repeat=len(sets)):
            if sum(each.num_devices for each in degrees) > problem.num_devices:
                continue
            can_be = all(
                problem.layers[layer].costs[problem.degrees.index(each)] is not None
                for layers, each in zip(sets, degrees, strict=True)
                for layer in layers
            )
            if not can_be:
                continue
            cut = problem.placed(zip(sets, degrees, strict=True), 0.0)
            if problem.fits(cut.stages):
                yield cut


def least(problem: StageProblem, objective: Objective, **which: bool) -> float:
    """The least cost over all cuts; infinity if none fits."""
    return min((objective(problem, cut) for cut in cuts(problem, **which)), default=float("inf"))


# --- costs --------------------------------------------------------------------------------------


def secs_of(problem: StageProblem, stage: PlacedStage) -> float:
    return sum(cost.secs for cost in problem.costs(stage))


def weights_of(problem: StageProblem, stage: PlacedStage) -> float:
    return sum(problem.layers[layer].weight_bytes for layer in stage.layers)


def crossing(problem: StageProblem, layers: tuple[int, ...]) -> tuple[float, float]:
    """Bytes of the results that enter and that leave a set of layers; each result counts once."""
    inside = set(layers)
    enters = {a for a, b in problem.edges if a not in inside and b in inside}
    leaves = {a for a, b in problem.edges if a in inside and b not in inside}
    size = [layer.out_bytes for layer in problem.layers]
    return sum(size[a] for a in enters), sum(size[a] for a in leaves)


def pipedream_cost(problem: StageProblem, cut: StageCut) -> float:
    return max(
        secs_of(problem, stage)
        + 4 * (m - 1) * weights_of(problem, stage)
        / (m**2 * problem.bytes_per_sec(problem.num_devices))
        for stage in cut.stages
        for m in [stage.degrees[0].data]
    )  # fmt: skip


def dapple_cost(problem: StageProblem, cut: StageCut) -> float:
    slowest = max(secs_of(problem, stage) for stage in cut.stages)
    total = sum(layer.costs[problem.degrees.index(Degrees(1, 1))].secs for layer in problem.layers)
    moved = sum(problem.transfer_secs(crossing(problem, stage.layers)[0]) for stage in cut.stages)
    exposed = [
        sum(cost.sync_secs for cost in problem.costs(stage)) - i * slowest
        for i, stage in enumerate(cut.stages)
    ]
    if len(cut.stages) > problem.microbatches:
        return float("inf")
    return slowest * (problem.microbatches - 1) + total + moved + max(0.0, *exposed)


def piper_cost(problem: StageProblem, cut: StageCut) -> float:
    bandwidth = problem.bytes_per_sec(problem.num_devices)
    loads = []
    for stage in cut.stages:
        d, t = stage.degrees[0].data, stage.degrees[0].tensor
        sync = 4 * (d - 1) / d * weights_of(problem, stage) / t / problem.microbatches
        moved = 2 * sum(crossing(problem, stage.layers)) / d
        loads.append(secs_of(problem, stage) + (sync + moved) / bandwidth)
    return max(loads)


def tarnawski_cost(problem: StageProblem, cut: StageCut) -> float:
    if any(len(stage.devices) > 1 for stage in cut.stages):
        return float("inf")
    return max(
        secs_of(problem, stage) + problem.transfer_secs(sum(crossing(problem, stage.layers)))
        for stage in cut.stages
    )


def alpa_cost(problem: StageProblem, cut: StageCut) -> float:
    if sum(len(stage.devices) for stage in cut.stages) < problem.num_devices:
        return float("inf")
    secs = [secs_of(problem, stage) for stage in cut.stages]
    return sum(secs) + (problem.microbatches - 1) * max(secs)


# --- planners whose choices ``cuts`` does not list ----------------------------------------------


def least_scattered(problem: StageProblem) -> float:
    """The least cost if every layer may be placed on any device."""
    alone = problem.degrees.index(Degrees(1, 1))
    costs = [layer.costs[alone] for layer in problem.layers]
    in_flight = min(problem.num_devices, problem.microbatches)
    best = float("inf")
    for owners in product(range(problem.num_devices), repeat=len(costs)):
        loads, is_small = [], True
        for device in set(owners):
            mine = tuple(i for i, owner in enumerate(owners) if owner == device)
            moved = problem.transfer_secs(sum(crossing(problem, mine)))
            loads.append(sum(costs[i].secs for i in mine) + moved)
            kept = sum(costs[i].resting_bytes + in_flight * costs[i].kept_bytes for i in mine)
            is_small &= kept + max(costs[i].work_bytes for i in mine) <= problem.memory_bytes
        if is_small:
            best = min(best, max(loads))
    return best


def least_hierarchical(problem: StageProblem) -> float:
    """The least cost of hierarchical pipelines.

    Each stage of the outer pipeline is an inner pipeline within one host, and is replicated on one
    or several hosts.
    """
    per_host = min(problem.per_host, problem.num_devices)
    num_hosts = problem.num_devices // per_host
    best = float("inf")
    for sets in chains(prefixes(problem)):
        for hosts in product(range(1, num_hosts + 1), repeat=len(sets)):
            if sum(hosts) <= num_hosts:
                loads = [
                    _host_cost(problem, layers, m, per_host)
                    + 4 * (m - 1) / m**2 / problem.outer_bytes_per_sec
                    * sum(problem.layers[layer].weight_bytes for layer in layers)
                    for layers, m in zip(sets, hosts, strict=True)
                ]  # fmt: skip
                best = min(best, max(loads))
    return best


def _host_cost(problem: StageProblem, layers: tuple[int, ...], m: int, per_host: int) -> float:
    best = float("inf")
    points = tuple(sum(1 << layer for layer in layers[:i]) for i in range(len(layers) + 1))
    choices = [d for d in problem.degrees if d.tensor == 1 and d.data % m == 0]
    for sets in chains(points):
        for degrees in product(choices, repeat=len(sets)):
            if sum(each.data // m for each in degrees) > per_host:
                continue
            stages = [
                PlacedStage(mine, tuple(range(each.data)), (each,) * len(mine))
                for mine, each in zip(sets, degrees, strict=True)
            ]
            has_costs = all(
                problem.layers[layer].costs[problem.degrees.index(each)] is not None
                for mine, each in zip(sets, degrees, strict=True)
                for layer in mine
            )
            if not has_costs or not problem.fits(stages):
                continue
            value = max(
                secs_of(problem, stage)
                + 4 * (r - 1) / r**2 / m / problem.inner_bytes_per_sec * weights_of(problem, stage)
                for stage in stages
                for r in [stage.degrees[0].data // m]
            )
            best = min(best, value)
    return best


def least_galvatron(
    problem: StageProblem, units: Callable[..., list[list[int]]], full: int
) -> float:
    """The least cost with any degrees per layer, if stages have equal sizes.

    All stages have equally many devices; their numbers of layers differ by at most one.

    Args:
        problem: the problem.
        units: returns the memory of every layer and degree, in units.
        full: the memory that layers may use on a device, in units.
    """
    best = float("inf")
    num_layers = len(problem.layers)
    for num in range(1, min(num_layers, problem.num_devices) + 1):
        if problem.num_devices % num:
            continue
        ends = [num_layers * i // num for i in range(num + 1)]
        size = problem.num_devices // num
        numbers = [i for i, d in enumerate(problem.degrees) if d.num_devices == size]
        secs = []
        for index, (a, b) in enumerate(pairwise(ends)):
            needs = units(problem, range(a, b), numbers, num - index - 1) if numbers else []
            ways = product(range(len(numbers)), repeat=b - a)
            times = [
                _strategy_secs(problem, range(a, b), [numbers[c] for c in way])
                for way in ways
                if sum(needs[row][c] for row, c in enumerate(way)) <= full
            ]
            secs.append(min(times, default=float("inf")))
        best = min(best, sum(secs) + (problem.microbatches - 1) * max(secs))
    return best


def _strategy_secs(problem: StageProblem, layers: range, chosen: list[int]) -> float:
    total = 0.0
    for row, (layer, number) in enumerate(zip(layers, chosen, strict=True)):
        cost = problem.layers[layer].costs[number]
        if cost is None:
            return float("inf")
        total += cost.secs + cost.sync_secs / problem.microbatches
        changes = problem.layers[layer].change_secs
        total += changes[chosen[row - 1]][number] if row and changes else 0.0
    return total
