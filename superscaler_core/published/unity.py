"""Unity's planner: best-first search over substitutions that change neighbours together.

Objective: as in ``flexflow``, the time of a step plus a price for bytes above a device's memory. A
substitution gives two or three connected nodes new choices at once. The search takes the cheapest
waiting assignment and applies all substitutions to it. A result waits too, if it was not seen
before and costs at most ``alpha`` times the best. A large space is cut into parts of some 10
consecutive nodes. Each part is optimized while all other nodes keep their choices, in turns until
no part improves; ``alpha`` then refers to the part's own time. In every second turn the boundaries
are shifted by half a part.

Complexity: for each of at most ``budget`` assignments, a part tries ``E C**2 + P C`` changes, with
its E edges, P paths of three nodes, and C choices. Of the ``C**3`` changes of three nodes, only
those are tried in which all take the choice of the same name, like a layout that is carried along.
This is a heuristic: ``alpha`` and the boundaries of parts decide which assignments are never tried.

Differences from the published code (``GraphSearchHelper::base_optimize``):

- there a substitution replaces a subgraph of operators by an equal one, and may add or remove
  operators that repartition, combine, replicate or reduce tensors; here the graph stays and
  communication belongs to edges, so a substitution changes choices alone;
- there a rewritten graph may have at most 1,000 operators; here at most 1,000 assignments wait;
- there large graphs are cut at an operator through which all paths go, and every layout of its
  result is tried; here they are cut at fixed positions, with the neighbours' layouts of that time.

Source: Unger et al., Unity, OSDI 2022, sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import chain, combinations, product

from superscaler_core.planners.proposals import propose_space
from superscaler_core.planners.row import PlannerRow
from superscaler_core.published.flexflow.walk import Move, Walk, fastest_alone
from superscaler_core.space import Assignment, Solution, Space

MOST_WAITING = 1000
"""The most assignments that wait; the cheapest are kept."""


def unity(
    space: Space,
    *,
    budget: int = 10,
    alpha: float = 1.05,
    part_nodes: int = 10,
    start: Sequence[int] | None = None,
    secs_per_excess_byte: float = 1e-9,
) -> Solution:
    """The best assignment that fits, of those that the search sees.

    Args:
        space: to search.
        budget: assignments whose substitutions are tried, per part and turn.
        alpha: an assignment is dropped if it takes more than this many times the best time in the
            part.
        part_nodes: nodes of a part of a large space.
        start: the first assignment; ``fastest_alone`` if None.
        secs_per_excess_byte: price of a byte above a device's memory; 1 ms per MB in FlexFlow.

    Raises:
        PlanError: no assignment that the search saw fits.
    """
    walk = Walk(space, fastest_alone(space) if start is None else start, secs_per_excess_byte)
    num, turn, stale = len(space.nodes), 0, 0
    # Two turns have both positions of the boundaries: two without a change end the search.
    while stale < 2:
        before, shift = walk.price, (turn % 2) * (part_nodes // 2)
        for first in range(-shift, num, part_nodes):
            part = range(max(first, 0), min(first + part_nodes, num))
            _best_first(
                walk, list(substitutions(space, part)), budget, (alpha - 1) * walk.secs_of(part)
            )
        turn, stale = turn + 1, 0 if walk.price < before else stale + 1
        stale = 2 if num <= part_nodes else stale
    return walk.solution("Unity")


def _best_first(walk: Walk, moves: Sequence[Move], budget: int, slack: float) -> None:
    """Search from a walk's assignment, and leave the walk at the best assignment seen.

    Args:
        walk: where the search begins.
        moves: all substitutions.
        budget: assignments whose substitutions are tried.
        slack: seconds; an assignment that costs more than the best by more than this is dropped.
    """
    best, best_price = tuple(walk.assignment), walk.price
    seen: set[Assignment] = {best}
    waiting: list[tuple[float, Assignment]] = [(best_price, best)]
    for _ in range(budget):
        if not waiting:
            break
        price, here = heappop(waiting)
        if price > best_price + slack:
            break
        walk.jump(here)
        for move in moves:
            walk.move(move)
            there = tuple(walk.assignment) if walk.price <= best_price + slack else best
            if there not in seen:
                seen.add(there)
                heappush(waiting, (walk.price, there))
                if walk.price < best_price:
                    best, best_price = there, walk.price
            walk.back()
        if len(waiting) > MOST_WAITING:
            waiting = nsmallest(MOST_WAITING, waiting)
    walk.jump(best)


def substitutions(space: Space, part: Sequence[int]) -> Iterator[Move]:
    """The substitutions in a part of a space: of two nodes on an edge, and of paths of three nodes.

    Two nodes take any two choices, which includes a change of only one of them. A node without an
    edge in the part takes any choice.
    """
    inside = set(part)
    joined = {(min(e.src, e.dst), max(e.src, e.dst)) for e in space.edges}
    pairs = sorted((a, b) for a, b in joined if a != b and {a, b} <= inside)
    near = {node: sorted({*chain(*(p for p in pairs if node in p))} - {node}) for node in part}
    choices = {node: range(space.nodes[node].num_choices) for node in part}
    yield from ({node: i} for node in part if not near[node] for i in choices[node])
    for a, b in pairs:
        yield from ({a: i, b: j} for i, j in product(choices[a], choices[b]))
    names = {node: {name: i for i, name in enumerate(space.nodes[node].choices)} for node in part}
    for middle in part:
        for ends in combinations(near[middle], 2):
            path = middle, *ends
            for name in names[middle]:
                if all(name in names[node] for node in path):
                    yield {node: names[node][name] for node in path}


PLANNER = PlannerRow(partial(propose_space, planner=unity), turn=90)
