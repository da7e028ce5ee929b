"""Elimination: nodes of a space with at most two neighbours are decided last, exactly.

A node that touches at most two others is replaced by what its best choice costs for every pair of
choices of those two (non-serial dynamic programming; Bertele and Brioschi, 1972). Chains, trees,
and blocks with residual connections vanish whole. What is left is the core of a space.

Spaces that differ in their costs alone are solved together: all costs may have a leading axis, with
a place for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from superscaler_core.planners.space import Array, Assignment, Space

Pair = tuple[int, int]

Choices = NDArray[np.int64]
"""Numbers of choices."""


@dataclass(eq=False)
class Core:
    """Nodes that are left of a space, and how the others follow from them.

    Law (tests/superscaler_core/planners/space): the least sum of the core's costs is
    the least time of the space, and ``assignment`` has it.

    Attributes:
        node_secs: what every choice of a node adds, ``[..., choice]``, by the node.
        pair_secs: what the choices of two nodes add, ``[..., choice, choice]``, by the nodes in
            ascending order.
        secs: of the nodes that nothing else depends on, ``[...]``.
    """

    node_secs: dict[int, Array]
    pair_secs: dict[Pair, Array]
    secs: Array | float = 0.0
    _followers: list[tuple[int, tuple[int, ...], Choices]] = field(default_factory=list)

    @classmethod
    def of(cls, space: Space) -> Core:
        """All nodes of a space, whose memory is not looked at."""
        return cls.joined(space, space.node_secs, space.edge_secs)

    @classmethod
    def joined(cls, space: Space, node_secs: Sequence[Array], edge_secs: Sequence[Array]) -> Core:
        """All nodes of a space; edges between the same two are one, those to itself are a node's.

        Args:
            space: for its edges' ends.
            node_secs, edge_secs: in place of the space's own.
        """
        core = cls(dict(enumerate(node_secs)), {})
        for edge, secs in zip(space.edges, edge_secs, strict=True):
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
        """The nodes that it shares costs with."""
        return tuple(sum(pair) - node for pair in self.pair_secs if node in pair)

    def eliminate(self) -> None:
        """Decide all nodes with at most two neighbours, until none is left or none can be.

        Complexity: for each node the product of three numbers of choices.
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
            # The axes are those of all ends so far, and the node's own as the last.
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
        """The same for one space or several, ``[..., node]``.

        Args:
            chosen: for the core's nodes, ``[...]``.
        """
        found = dict(chosen)
        for node, ends, best in reversed(self._followers):
            for end in ends:
                at = found[end].reshape(found[end].shape + (1,) * (best.ndim - found[end].ndim))
                axis = found[end].ndim
                best = np.take_along_axis(best, at, axis=axis).squeeze(axis)
            found[node] = best
        return np.stack([found[node] for node in sorted(found)], axis=-1)
