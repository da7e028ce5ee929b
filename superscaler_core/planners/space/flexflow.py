"""FlexFlow's planner: a random walk over assignments, by the Metropolis rule.

Objective: the time of a step, and 1 ms for every MB above a device's memory, as in FlexFlow's
simulator; so an assignment that does not fit is priced and not rejected, and only those that fit
count as found. A step of the walk gives a random node a random choice. With t the price before and
t' after,

    accepted if t' < t, else with probability exp(-alpha (t' - t))

so it is the absolute difference that counts, not the ratio. Every ``budget / 100`` steps, at least
1 and at most 1,000, the walk returns to the best assignment that it saw. With ``propagate`` every
fourth step instead carries the choice of a node along edges to neighbours, from each on to the next
with probability 3/4.

Complexity: a step reads the edges of a node. A heuristic: it reaches the best assignment with
probability 1 if it walks forever, and says nothing about how far it is.

Differences from the published code (``FFModel::mcmc_optimize``): it counts in milliseconds, and
``alpha`` here is per second. Choices are those of the space, not of FlexFlow's operators; a choice
is carried to a neighbour where that has one of the same name. Its walk starts at data parallelism;
here without ``start`` at the choices that are fastest one by one. The step is priced by the change
at the node, not by a new simulation. The last op keeps its choice there; here if ``keep_last``.

Source: Jia et al., Beyond Data and Model Parallelism (FlexFlow), MLSys 2019, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random

from superscaler_core.planners.space import Solution, Space
from superscaler_core.planners.space.walk import Move, Walk, fastest_alone

PROPAGATES = 0.25
"""Share of the steps that carry a choice along edges."""

GOES_ON = 0.75
"""Probability that it is carried to one more node."""


def flexflow(
    space: Space,
    *,
    budget: int = 100_000,
    alpha: float = 1000.0,
    seed: int = 0,
    start: Sequence[int] | None = None,
    propagate: bool = False,
    keep_last: bool = True,
    secs_per_excess_byte: float = 1e-9,
) -> Solution:
    """The best assignment that a random walk sees.

    Args:
        space: to search.
        budget: steps of the walk.
        alpha: how unlikely a longer step is accepted, per second; infinite is greedy.
        seed: of the random numbers.
        start: where the walk begins; ``fastest_alone`` if None.
        propagate: also carry choices along edges.
        keep_last: never choose anew for the last node, as the published code does.
        secs_per_excess_byte: the price of memory that is not there; 1 ms a MB in FlexFlow.

    Raises:
        PlanError: nothing that it saw fits.
    """
    random = Random(seed)
    walk = Walk(space, fastest_alone(space) if start is None else start, secs_per_excess_byte)
    best, best_price = tuple(walk.assignment), walk.price
    moved = range(len(space.nodes) - 1 if keep_last else len(space.nodes))
    span = min(max(budget // 100, 1), 1000)
    for step in range(budget if moved else 0):
        if step % span == 0:
            walk.jump(best)
        carries = propagate and random.random() < PROPAGATES
        node = random.choice(moved)
        move = (
            _carried(space, walk.assignment, node, moved, random)
            if carries
            else {node: random.randrange(space.nodes[node].num_choices)}
        )
        if not accepts(walk.move(move), alpha, random):
            walk.back()
        elif walk.price < best_price:
            best, best_price = tuple(walk.assignment), walk.price
    return walk.solution("FlexFlow")


def accepts(rise: float, alpha: float, random: Random) -> bool:
    """Whether a step whose price rises so much, in seconds, is accepted."""
    return rise <= 0 or random.random() < exp(-alpha * rise)


def _carried(
    space: Space, assignment: Sequence[int], node: int, moved: Sequence[int], random: Random
) -> Move:
    """The choice of a node, carried along edges to nodes that have one of the same name."""
    name = space.nodes[node].choices[assignment[node]]
    seen, move = {node}, dict[int, int]()
    while True:
        ends = {
            end
            for number in space.edges_of[node]
            for end in (space.edges[number].src, space.edges[number].dst)
        }
        near = sorted(
            end for end in ends - seen if end in moved and name in space.nodes[end].choices
        )
        if not near:
            return move
        node = random.choice(near)
        seen.add(node)
        move[node] = space.nodes[node].choices.index(name)
        if random.random() >= GOES_ON:
            return move
