"""Space: nodes with choices, the costs of the choices, and costs between neighbours' choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rvdcomm.units import bytes_text
from superscaler_core.errors import PlanError

Array = NDArray[np.float64]

Assignment = tuple[int, ...]
"""The number of the choice of every node."""

"""Attributes of a node that may be left out."""


@dataclass(frozen=True, eq=False)
class SpaceNode:
    """Ops that one decision cuts, with the costs of all their choices, each ``[choice]``.

    Attributes:
        name: for people; distinct in a space.
        choices: names of the choices, for people.
        forward_secs, backward_secs: computing of a microbatch; infinite for an impossible choice.
        sync_secs: once per step: fetching weights, reducing gradients, and the update.
        resting_bytes: weights, gradients and optimizer states on a device.
        kept_bytes: bytes that a microbatch keeps on a device from its forward to its backward.
        work_bytes: bytes that one microbatch needs in addition while the node runs.
        count: how many nodes of equal costs take this decision together, as repeated blocks do.
    """

    name: str
    choices: tuple[str, ...]
    forward_secs: Array
    backward_secs: Array
    sync_secs: Array
    resting_bytes: Array
    kept_bytes: Array
    work_bytes: Array
    count: int = 1

    @classmethod
    def of(
        cls,
        name: str,
        choices: Iterable[str],
        *,
        forward_secs: ArrayLike,
        backward_secs: ArrayLike = 0.0,
        sync_secs: ArrayLike = 0.0,
        resting_bytes: ArrayLike = 0.0,
        kept_bytes: ArrayLike = 0.0,
        work_bytes: ArrayLike = 0.0,
        count: int = 1,
    ) -> SpaceNode:
        """A node; each cost is one number for all choices, or one per choice; 0 if left out.

        Raises:
            PlanError: there is no choice, or a cost has another number of values.
        """
        names = tuple(choices)
        given = forward_secs, backward_secs, sync_secs, resting_bytes, kept_bytes, work_bytes
        try:
            costs = [np.broadcast_to(np.asarray(x, dtype=float), (len(names),)) for x in given]
        except ValueError:
            costs = []
        if not names or not costs:
            raise PlanError(
                f"node {name} with {len(names)} choices: it has to have one at least, and one "
                "number of each cost for all choices or for each."
            )
        forward, backward, sync, resting, kept, work = costs
        return cls(name, names, forward, backward, sync, resting, kept, work, count)

    @property
    def num_choices(self) -> int:
        """The number of choices."""
        return len(self.choices)


@dataclass(frozen=True, eq=False)
class SpaceEdge:
    """The costs of moving results of ``src`` to ``dst``, for every pair of their choices.

    Attributes:
        src, dst: numbers of the nodes.
        forward_secs, backward_secs: moving of a microbatch, ``[choice of src, choice of dst]``;
            infinite where two choices exclude each other.
        count: number of edges with these costs between the two decisions, as in repeated blocks.
    """

    src: int
    dst: int
    forward_secs: Array
    backward_secs: Array
    count: int = 1

    @classmethod
    def of(
        cls,
        src: int,
        dst: int,
        forward_secs: ArrayLike,
        backward_secs: ArrayLike | None = None,
        count: int = 1,
    ) -> SpaceEdge:
        """An edge; its backward takes no time if none is given."""
        forward = np.asarray(forward_secs, dtype=float)
        backward = np.zeros_like(forward) if backward_secs is None else np.asarray(backward_secs)
        return cls(src, dst, forward, backward.astype(float), count)


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a planner: an assignment, with the seconds of a step by the space.

    ``bound_secs`` is a lower bound on the time of all assignments that fit; 0 if none is known.
    """

    assignment: Assignment
    secs: float
    bound_secs: float = 0.0


@dataclass(frozen=True, eq=False)
class Space:
    """Nodes and edges, with the objective and the memory limit of all planners.

    All planners that decide how ops are cut search this space: they differ in how they search, not
    in what a plan costs (``price_space``).

    Law (tests/superscaler_core/space): ``secs`` is the sum of ``node_secs`` and
    ``edge_secs`` at the chosen numbers.

    Attributes:
        nodes: in the order in which they run.
        edges: between nodes. Two nodes may have several. An edge from a node to itself stands for
            repeated blocks that follow each other.
        microbatches: microbatches in a step.
        in_flight: microbatches between forward and backward at a time.
        memory_bytes: memory of a device.

    >>> space = Space(
    ...     (SpaceNode.of("a", "xy", forward_secs=[1, 2]), SpaceNode.of("b", "xy", forward_secs=1)),
    ...     (SpaceEdge.of(0, 1, [[0, 9], [9, 0]]),),
    ... )
    >>> space.secs((0, 0)), space.secs((0, 1))
    (2.0, 11.0)
    """

    nodes: tuple[SpaceNode, ...]
    edges: tuple[SpaceEdge, ...] = ()
    microbatches: int = 1
    in_flight: int = 1
    memory_bytes: float = inf

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) < len(names):
            raise PlanError(f"a space of nodes {names}: there is at least one, and each is once.")
        for edge in self.edges:
            ends = self.nodes[edge.src], self.nodes[edge.dst]
            shape = tuple(end.num_choices for end in ends)
            if edge.forward_secs.shape != shape or edge.backward_secs.shape != shape:
                raise PlanError(
                    f"edge from {ends[0].name} to {ends[1].name}: its costs have to be "
                    f"{list(shape)}, and are {list(edge.forward_secs.shape)} and "
                    f"{list(edge.backward_secs.shape)}."
                )

    # --- costs ----------------------------------------------------------------------------------

    @cached_property
    def node_secs(self) -> tuple[Array, ...]:
        """Seconds that each node adds to a step, ``[choice]``."""
        return tuple(
            node.count
            * (self.microbatches * (node.forward_secs + node.backward_secs) + node.sync_secs)
            for node in self.nodes
        )

    @cached_property
    def edge_secs(self) -> tuple[Array, ...]:
        """Seconds that each edge adds to a step, ``[choice of src, choice of dst]``."""
        times = self.microbatches
        return tuple(
            edge.count * times * (edge.forward_secs + edge.backward_secs) for edge in self.edges
        )

    @cached_property
    def held_bytes(self) -> tuple[Array, ...]:
        """Bytes that each node holds on a device, ``[choice]``."""
        return tuple(
            node.count * (node.resting_bytes + self.in_flight * node.kept_bytes)
            for node in self.nodes
        )

    def secs(self, assignment: Sequence[int]) -> float:
        """Seconds of a step."""
        nodes = sum(secs[i] for secs, i in zip(self.node_secs, assignment, strict=True))
        moves = sum(
            secs[assignment[edge.src], assignment[edge.dst]]
            for secs, edge in zip(self.edge_secs, self.edges, strict=True)
        )
        return float(nodes + moves)

    def bytes(self, assignment: Sequence[int]) -> float:
        """Bytes on a device: what all nodes hold, plus the largest work memory of one node."""
        held = sum(size[i] for size, i in zip(self.held_bytes, assignment, strict=True))
        pairs = zip(self.nodes, assignment, strict=True)
        return float(held + max(node.work_bytes[i] for node, i in pairs))

    def fits(self, assignment: Sequence[int]) -> bool:
        """Whether a device has memory for the assignment, and all its choices are possible."""
        return self.bytes(assignment) <= self.memory_bytes and self.secs(assignment) < inf

    # --- structure ------------------------------------------------------------------------------

    @property
    def num_assignments(self) -> int:
        """The number of assignments."""
        return prod(node.num_choices for node in self.nodes)

    @cached_property
    def edges_of(self) -> Mapping[int, tuple[int, ...]]:
        """Numbers of the edges at every node."""
        found: dict[int, tuple[int, ...]] = {i: () for i in range(len(self.nodes))}
        for number, edge in enumerate(self.edges):
            for end in {edge.src, edge.dst}:
                found[end] = (*found[end], number)
        return found

    def change_secs(self, assignment: Sequence[int], node: int, choice: int) -> float:
        """By how many seconds a step gets longer if a node changes its choice.

        Complexity: linear in the edges of that node.
        """
        found = self.node_secs[node][choice] - self.node_secs[node][assignment[node]]
        for number in self.edges_of[node]:
            edge, secs = self.edges[number], self.edge_secs[number]
            ends = assignment[edge.src], assignment[edge.dst]
            after = (
                choice if edge.src == node else ends[0],
                choice if edge.dst == node else ends[1],
            )
            found += secs[after] - secs[ends]
        return float(found)

    def solution(self, assignment: Sequence[int], bound_secs: float = 0.0) -> Solution:
        """An assignment with its time."""
        return Solution(tuple(map(int, assignment)), self.secs(assignment), bound_secs)

    def none_fits(self, planner: str) -> PlanError:
        """The error of a planner that finds no assignment."""
        least = sum(size.min() for size in self.held_bytes)
        return PlanError(
            f"{planner}: no choice of {len(self.nodes)} nodes fits: they hold at least "
            f"{bytes_text(least)} on a device of {bytes_text(self.memory_bytes)}; use more "
            "devices, smaller microbatches, or recomputation."
        )
