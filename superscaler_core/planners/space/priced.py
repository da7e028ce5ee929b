"""PricedSpace: the space of a model, and what an assignment means for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.units import bytes_text
from superscaler_core.cost import CostModel
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Keep, OpSplit, Plan
from superscaler_core.planners.space.choices import Choice
from superscaler_core.planners.space.groups import OpGroup
from superscaler_core.planners.space.space import Space
from superscaler_core.report.table import table
from superscaler_core.schedules import one_f_one_b


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
        """Every group with its choice."""
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

        Args:
            assignment: the choices of all nodes.
            op: name of the op.

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
