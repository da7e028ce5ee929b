"""FlexFlow's planner: a random walk over assignments, by the Metropolis rule.

Objective: the time of a step, plus 1 ms for every MB above a device's memory, as in FlexFlow's
simulator. The walk may therefore pass through assignments that do not fit, but only one that fits
is returned. A step of the walk gives a random node a random choice. With t the price before and t'
after, the step is

    accepted if t' < t, else with probability exp(-alpha (t' - t))

so the absolute difference counts, not the ratio. Every ``budget / 100`` steps, but at least 1 and
at most 1,000, the walk returns to the best assignment seen. With ``propagate``, a quarter of the
steps instead carry the choice of a node along edges: to a neighbour, and from each node on to the
next with probability 3/4.

Complexity: a step reads the edges of one node. This is a heuristic: an infinite walk reaches the
best assignment with probability 1, but a finite walk gives no bound on its gap.

Differences from the published code (``FFModel::mcmc_optimize``):

- there ``alpha`` is per millisecond, here per second;
- choices are those of the space, not of FlexFlow's operators; a choice is carried to a neighbour
  that has a choice of the same name;
- there the walk starts at data parallelism; here, without ``start``, at ``fastest_alone``;
- a step is priced by the change at the node, not by a new simulation;
- there the last op always keeps its choice; here if ``keep_last``.

Source: Jia et al., Beyond Data and Model Parallelism (FlexFlow), MLSys 2019, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import exp
from random import Random

from superscaler_core.planners.proposals import propose_space
from superscaler_core.planners.row import PlannerRow
from superscaler_core.published.flexflow.walk import Move, Walk, fastest_alone
from superscaler_core.space import Solution, Space

PROPAGATES = 0.25
"""Share of the steps that carry a choice along edges, with ``propagate``."""

GOES_ON = 0.75
"""Probability that a choice is carried on to one more node."""


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
    """The best assignment that fits, of those that a random walk sees.

    Args:
        space: to search.
        budget: steps of the walk.
        alpha: per second: a step that raises the price by t seconds is accepted with probability
            exp(-alpha t); infinity accepts no rise.
        seed: seed of the random numbers.
        start: where the walk begins; ``fastest_alone`` if None.
        propagate: also carry choices along edges.
        keep_last: keep the choice of the last node, as the published code does.
        secs_per_excess_byte: price of a byte above a device's memory; 1 ms per MB in FlexFlow.

    Raises:
        PlanError: no assignment that the walk saw fits.
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
    """Whether a step that raises the price by ``rise`` seconds is accepted."""
    return rise <= 0 or random.random() < exp(-alpha * rise)


def _carried(
    space: Space, assignment: Sequence[int], node: int, moved: Sequence[int], random: Random
) -> Move:
    """The choice of a node, carried along edges to nodes that have a choice of the same name."""
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


PLANNER = PlannerRow(partial(propose_space, planner=flexflow), turn=60)
