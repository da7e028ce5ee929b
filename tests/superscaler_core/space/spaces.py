"""Random small spaces, for tests of planners."""

from __future__ import annotations

import numpy as np

from superscaler_core.space import Space, SpaceEdge, SpaceNode


def random_space(
    seed: int,
    *,
    most_nodes: int = 5,
    most_choices: int = 4,
    has_memory: bool = False,
    excluded: float = 0.0,
) -> Space:
    """A random space whose costs are whole numbers, so that sums are exact.

    Args:
        seed: seed of the random numbers.
        most_nodes, most_choices: largest number of nodes, and of choices per node.
        has_memory: whether memory is limited to the memory of the first choices of all nodes.
        excluded: share of the pairs of choices that exclude each other; choices with equal numbers
            never exclude each other.
    """
    random = np.random.default_rng(seed)
    num = int(random.integers(2, most_nodes + 1))
    nodes = tuple(
        SpaceNode.of(
            f"n{i}",
            [f"c{c}" for c in range(many)],
            forward_secs=random.integers(1, 20, many),
            backward_secs=random.integers(1, 20, many),
            sync_secs=random.integers(0, 20, many),
            resting_bytes=random.integers(0, 20, many),
            kept_bytes=random.integers(0, 20, many),
            work_bytes=random.integers(0, 20, many),
            count=int(random.integers(1, 3)),
        )
        for i, many in enumerate(random.integers(1, most_choices + 1, num).tolist())
    )
    edges = []
    for dst in range(num):
        for src in range(dst + 1):
            if random.random() < (0.1 if src == dst else 0.6):
                shape = nodes[src].num_choices, nodes[dst].num_choices
                forward = random.integers(0, 30, shape).astype(float)
                rows, columns = np.indices(shape)
                forward[(random.random(shape) < excluded) & (rows != columns)] = np.inf
                edges.append(SpaceEdge.of(src, dst, forward, random.integers(0, 30, shape)))
    space = Space(nodes, tuple(edges), microbatches=int(random.integers(1, 4)))
    if not has_memory:
        return space
    # The first choices never exclude each other, so at least one assignment fits.
    some = (0,) * num
    return Space(nodes, tuple(edges), space.microbatches, memory_bytes=space.bytes(some))
