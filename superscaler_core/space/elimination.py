"""Elimination: an exact reduction of a space by its nodes with at most two neighbours.

Source: non-serial dynamic programming; Bertele and Brioschi, 1972.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from superscaler_core.space.space import Array, Assignment, Space

Pair = tuple[int, int]

Choices = NDArray[np.int64]
"""Numbers of choices."""


@dataclass(eq=False)
class Core:
    """The nodes that remain of a space, and how the choices of all others follow from theirs.

    A node with at most two neighbours is replaced by the cost of its best choice, for every pair of
    their choices; its choice is decided after theirs. Chains, trees, and blocks with residual
    connections vanish completely. Spaces that differ only in their costs are solved together: all
    costs may have a leading axis with one entry per space.

    Law (tests/superscaler_core/space): the least sum of the core's costs is the least time
    of the space, and ``assignment`` returns an assignment with that time.

    Attributes:
        node_secs: for every node, the seconds that each of its choices adds, ``[..., choice]``.
        pair_secs: for two nodes in ascending order, the seconds that each pair of their choices
            adds, ``[..., choice, choice]``.
        secs: seconds of the eliminated nodes that had no neighbour left, ``[...]``.
    """

    node_secs: dict[int, Array]
    pair_secs: dict[Pair, Array]
    secs: Array | float = 0.0
    _followers: list[tuple[int, tuple[int, ...], Choices]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        space: Space,
        node_secs: Sequence[Array] | None = None,
        edge_secs: Sequence[Array] | None = None,
    ) -> Core:
        """A core of all nodes of a space, or with other costs in its place; memory is ignored.

        Parallel edges are merged, and an edge to itself is node cost.
        """
        core = cls(dict(enumerate(space.node_secs if node_secs is None else node_secs)), {})
        found = space.edge_secs if edge_secs is None else edge_secs
        for edge, secs in zip(space.edges, found, strict=True):
            if edge.src == edge.dst:
                own = secs.diagonal(axis1=-2, axis2=-1)
                core.node_secs[edge.src] = core.node_secs[edge.src] + own
            else:
                core._add((edge.src, edge.dst), secs)
        return core

    def _add(self, ends: Pair, secs: Array) -> None:
        if ends[0] > ends[1]:
            ends, secs = (ends[1], ends[0]), secs.swapaxes(-1, -2)
        self.pair_secs[ends] = self.pair_secs[ends] + secs if ends in self.pair_secs else secs

    def neighbours(self, node: int) -> tuple[int, ...]:
        """The nodes with which a node shares costs."""
        return tuple(sum(pair) - node for pair in self.pair_secs if node in pair)

    def eliminate(self) -> None:
        """Eliminate nodes with at most two neighbours until there are none.

        Complexity: for each node, the product of its number of choices and those of its neighbours.
        """
        around = {node: set(self.neighbours(node)) for node in self.node_secs}
        waiting = list(around)
        while waiting:
            node = waiting.pop()
            if node not in self.node_secs or len(around[node]) > 2:
                continue
            ends = tuple(sorted(around.pop(node)))
            self._decide(node, ends)
            for end in ends:
                around[end].discard(node)
                around[end].update(other for other in ends if other != end)
            waiting += ends

    def _decide(self, node: int, ends: tuple[int, ...]) -> None:
        """Replace a node by costs of its neighbours."""
        total = self.node_secs.pop(node)
        for end in ends:
            pair = min(node, end), max(node, end)
            secs = self.pair_secs.pop(pair)
            by_end = secs.swapaxes(-1, -2) if pair[0] == node else secs
            # The last axes of ``total`` are one for each end so far, then the node's own.
            total = total[..., None, :] + (by_end if end == ends[0] else by_end[..., None, :, :])
        best = total.argmin(axis=-1)
        least = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        if not ends:
            self.secs = self.secs + least
        elif len(ends) == 1:
            self.node_secs[ends[0]] = self.node_secs[ends[0]] + least
        else:
            self._add((ends[0], ends[1]), least)
        self._followers.append((node, ends, best))

    def assignment(self, chosen: Mapping[int, int]) -> Assignment:
        """The choice of every node of the space, from those of the core's nodes."""
        found = self.choices({node: np.asarray(choice) for node, choice in chosen.items()})
        return tuple(found.tolist())

    def choices(self, chosen: Mapping[int, Choices]) -> Choices:
        """As ``assignment``, for one space or several: ``[..., node]`` from ``[...]`` of each."""
        found = dict(chosen)
        for node, ends, best in reversed(self._followers):
            for end in ends:
                at = found[end].reshape(found[end].shape + (1,) * (best.ndim - found[end].ndim))
                axis = found[end].ndim
                best = np.take_along_axis(best, at, axis=axis).squeeze(axis)
            found[node] = best
        return np.stack([found[node] for node in sorted(found)], axis=-1)
