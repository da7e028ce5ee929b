"""The space of a captured model on a mesh of devices, and what an assignment means for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import rvdcomm as rv
from rvdcomm.units import bytes_text
from superscaler_core.cost import CostModel
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Keep, OpSplit, Plan
from superscaler_core.report.table import table
from superscaler_core.schedules import one_f_one_b
from superscaler_core.space.choices import Choice
from superscaler_core.space.edges import edges_of
from superscaler_core.space.groups import OpGroup
from superscaler_core.space.nodes import Nodes
from superscaler_core.space.space import Space


@dataclass(frozen=True, eq=False)
class PricedSpace:
    """The space of a model on a mesh of devices.

    Attributes:
        space: what planners search.
        costs: the cost functions that priced the space.
        devices: the devices of the mesh.
        groups: for every node the groups of ops that take its decision: one group, or one from each
            repeated block.
        choices: the choices of every node.
        keep: what blocks keep for the backward.
    """

    space: Space
    costs: CostModel
    devices: tuple[Device, ...]
    groups: tuple[tuple[OpGroup, ...], ...]
    choices: tuple[tuple[Choice, ...], ...]
    keep: Keep = Keep.EVERYTHING

    @cached_property
    def node_of(self) -> Mapping[str, int]:
        """The node of every op, by the op's name."""
        return {
            op.name: number
            for number, groups in enumerate(self.groups)
            for group in groups
            for op in group
        }

    def splits(self, assignment: Sequence[int]) -> Mapping[Op, OpSplit]:
        """The split of every op."""
        taken = self._taken(assignment)
        return {op: split for group, each in taken for op, split in each.split_of(group).items()}

    def storage(self, assignment: Sequence[int]) -> Mapping[PTensor, OpSplit]:
        """The storage of the weights that are not stored where they are read."""
        graph, taken = self.costs.graph, self._taken(assignment)
        return {t: split for g, each in taken for t, split in each.storage(graph, g).items()}

    def _taken(self, assignment: Sequence[int]) -> list[tuple[OpGroup, Choice]]:
        nodes = zip(self.groups, self.choices, assignment, strict=True)
        return [(group, choices[number]) for groups, choices, number in nodes for group in groups]

    def fill(self, plan: Plan, assignment: Sequence[int]) -> None:
        """Set the splits, the storage of weights and the recomputation of a plan, as assigned.

        A plan of one stage that has no schedule gets the microbatches of the space.

        Raises:
            PlanError: the plan is of another graph.
        """
        if plan.graph is not self.costs.graph:
            raise PlanError(f"a space of {self.costs.graph.name}: the plan is of another graph.")
        for op, split in self.splits(assignment).items():
            plan.split_as(op, split)
        for tensor, split in self.storage(assignment).items():
            plan.split_as(plan.update(tensor.name), split)
        if self.keep is not Keep.EVERYTHING:
            plan.keep(self.keep)
        plan.recompute_regions(
            *(group for group, each in self._taken(assignment) if each.is_recompute)
        )
        if plan.schedule is None and plan.num_stages == 1 and self.space.microbatches > 1:
            plan.op_order(one_f_one_b(1, self.space.microbatches))

    def explain(self, assignment: Sequence[int], op: str) -> str:
        """A table of what each choice of an op would cost; all other nodes stay as assigned.

        Raises:
            PlanError: the space has no such op.
        """
        if op not in self.node_of:
            raise PlanError(f"the space of {self.costs.graph.name} has no op {op}.")
        space, node = self.space, self.node_of[op]
        of = space.nodes[node]
        rows = []
        for number, name in enumerate(of.choices):
            there = [*assignment[:node], number, *assignment[node + 1 :]]
            moves = sum(
                secs[there[edge.src], there[edge.dst]]
                for edge, secs in zip(space.edges, space.edge_secs, strict=True)
                if node in (edge.src, edge.dst)
            )
            computes = of.count * space.microbatches * (of.forward_secs + of.backward_secs)[number]
            more = space.change_secs(assignment, node, number)
            times = (computes, moves, of.count * of.sync_secs[number])
            mark = "*" if number == assignment[node] else ""
            held = bytes_text(int(space.held_bytes[node][number]))
            rows.append(
                [mark, name, *(f"{1e3 * x:.3f}" for x in times), held, f"{1e3 * more:+.3f}"]
            )
        header = ("", "choice", "compute ms", "moves ms", "weights ms", "holds", "step ms")
        alike = f" and those of {of.count - 1} blocks like its own" if of.count > 1 else ""
        group = next(ops for ops in self.groups[node] if any(op == each.name for each in ops))
        with_it = f"{op} is decided with {len(group) - 1} ops of its group{alike}"
        return f"{with_it}\n{table(header, rows)}"


def price_space(
    costs: CostModel,
    devices: Sequence[Device],
    *,
    mesh: Sequence[int] | None = None,
    microbatches: int = 1,
    in_flight: int = 1,
    memory_bytes: float | None = None,
    ops: Sequence[Op] | None = None,
    blocks: Blocks | None = None,
    same_blocks: bool = True,
    keep: Keep = Keep.EVERYTHING,
    recompute_regions: bool = False,
    pieces: bool = False,
) -> PricedSpace:
    """The space of a model: its groups of ops, all cuts of each on a mesh, and their costs.

    Law (tests/superscaler_core/space): if everything is kept for the backward,
    ``Space.secs`` of an assignment equals ``step_secs`` of ``CostModel.stage_cost`` with the same
    splits, except that

    - the latency of the calls that move weights is left out: all weights share one call each way;
    - a result that several groups read in one layout moves once, but counts for each of them;
    - a weight that several groups read is updated once, but counts for each of them; and replicas
      of an op that reads only weights compute shares of its gradient only where one group reads the
      op's result;
    - a recomputed group repeats bias additions that its first run does in the call of a product,
      and leaves out moves to other groups: a few per cent more or less.

    Apart from the first and the last point, ``Space.secs`` is therefore an upper bound. A tensor
    that two groups save counts twice in memory.

    Blocks with equal ops are priced once, so pricing takes as long as the distinct blocks need.

    Args:
        costs: the cost functions of the model, for one microbatch, which all devices share.
        devices: all devices of the topology, or some.
        mesh: sizes of the axes, the last one innermost; if None, hosts times devices of a host.
        microbatches: microbatches in a step.
        in_flight: microbatches between forward and backward at a time.
        memory_bytes: memory of a device; that of the profile if None.
        ops: consecutive ops of the graph, such as a stage; all if None.
        blocks: the blocks of the graph; found by its structure if None.
        same_blocks: whether blocks with equal ops take the same decisions.
        keep: ``EVERYTHING``, or ``BLOCK_INPUTS`` for blocks that keep only what they read.
        recompute_regions: whether each choice also has a variant with recomputation, in which the
            group keeps only what it reads and runs again before its backward; only for groups of
            consecutive ops.
        pieces: whether each choice that leaves copies of weights also has a variant in which the
            devices that read the same part of a weight store a piece of it each (ZeRO).

    Raises:
        PlanError: the mesh has another number of devices; ``keep`` is neither of the two; or
            ``recompute_regions`` is combined with ``BLOCK_INPUTS``.
    """
    if keep not in (Keep.EVERYTHING, Keep.BLOCK_INPUTS) or (
        recompute_regions and keep is Keep.BLOCK_INPUTS
    ):
        raise PlanError(
            f"keep={keep.value}, recompute_regions={recompute_regions}: a space has everything "
            "kept, or block_inputs, or groups that are recomputed."
        )
    chosen = tuple(_mesh_of(devices, costs.topology) if mesh is None else mesh)
    if prod(chosen) != len(devices):
        raise PlanError(
            f"a mesh of {' x '.join(map(str, chosen))} has {prod(chosen)} devices, but "
            f"{len(devices)} were given."
        )
    graph = costs.graph
    nodes = Nodes(
        costs, blocks or find_blocks(graph), tuple(graph.ops if ops is None else ops),
        tuple(devices), chosen, microbatches, same_blocks, keep, recompute_regions, pieces,
    )  # fmt: skip
    space = Space(
        nodes.priced,
        edges_of(nodes),
        microbatches,
        in_flight,
        costs.profile.memory_bytes if memory_bytes is None else memory_bytes,
    )
    return PricedSpace(space, costs, nodes.devices, nodes.groups, nodes.choices, keep)


def _mesh_of(devices: Sequence[Device], topology: rv.Topology) -> tuple[int, ...]:
    """Hosts times devices of a host; one axis if the devices are not several whole hosts."""
    if len(topology.levels) > 1:
        per_host = len(topology.levels[1].groups[0])
        if len(devices) > per_host and len(devices) % per_host == 0:
            return len(devices) // per_host, per_host
    return (len(devices),)
