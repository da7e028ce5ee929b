"""PricedSpace: a space that was priced from a model, and what an assignment means for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.cost import CostModel
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Device, OpSplit, Plan
from superscaler_core.planners.space.choices import Choice
from superscaler_core.planners.space.groups import OpGroup
from superscaler_core.planners.space.space import Space
from superscaler_core.schedules import one_f_one_b


@dataclass(frozen=True, eq=False)
class PricedSpace:
    """The space of a model on a mesh of devices.

    Attributes:
        space: what planners search.
        costs: the cost functions that it was priced with.
        devices: of the mesh.
        groups: for every node the groups of ops that take its decision: one, or one of each of the
            repeated blocks.
        choices: of every node.
    """

    space: Space
    costs: CostModel
    devices: tuple[Device, ...]
    groups: tuple[tuple[OpGroup, ...], ...]
    choices: tuple[tuple[Choice, ...], ...]

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
        return {
            op: split
            for groups, choices, number in zip(self.groups, self.choices, assignment, strict=True)
            for group in groups
            for op, split in zip(group, choices[number].splits, strict=True)
        }

    def fill(self, plan: Plan, assignment: Sequence[int]) -> None:
        """Set the splits of a plan as assigned.

        A plan of one stage that has no schedule gets the microbatches of the space.

        Raises:
            PlanError: the plan is of another graph.
        """
        if plan.graph is not self.costs.graph:
            raise PlanError(f"a space of {self.costs.graph.name}: the plan is of another graph.")
        for op, split in self.splits(assignment).items():
            plan.split_as(op, split)
        if plan.schedule is None and plan.num_stages == 1 and self.space.microbatches > 1:
            plan.op_order(one_f_one_b(1, self.space.microbatches))

    def explain(self, assignment: Sequence[int], op: str) -> str:
        """What each choice of an op would cost, all others being as assigned; a table.

        Args:
            assignment: the choices of all nodes.
            op: its name.

        Raises:
            PlanError: the space has no such op.
        """
        if op not in self.node_of:
            raise PlanError(f"the space of {self.costs.graph.name} has no op {op}.")
        return self.space.explain(assignment, self.node_of[op])
