"""Segments: sequences of parts on one device without communication in between."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.materialize.edges import Edges
from superscaler_core.materialize.sequence import Compute, Item, MoveStep
from superscaler_core.plan import Device, Plan
from superscaler_core.schedules import ActionKind


@dataclass(frozen=True, eq=False)
class Segment:
    """Parts that run as one generated function.

    Attributes:
        name: name of the function.
        parts: the parts, in order.
        recompute: whether its backward recomputes its forward.
        swap: whether the values that it keeps for its backward wait on the host.
        region: number of the group with which it is recomputed as a whole; 0 if none.
        has_backward: whether any of its results has a gradient.
        is_left_out: whether the recomputation of its region leaves it out, because its own backward
            recomputes it and nothing else in the region reads its results.
        products: bias additions done by a product among the parts (see ``products_of``).
    """

    name: str
    parts: tuple[Part, ...]
    recompute: bool
    swap: bool = False
    region: int = 0
    has_backward: bool = False
    is_left_out: bool = False
    products: Mapping[Part, Part] = field(default_factory=dict)

    @cached_property
    def has_weights(self) -> bool:
        """Whether the segment reads a trained weight."""
        return any(part.op.form.trained for part in self.parts)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the parts, in order."""
        return tuple(part.op for part in self.parts)


def segment_name(stage: int, number: int) -> str:
    """The name of a segment by its number in a stage."""
    return f"stage{stage}_segment{number}"


def stage_of_segment(name: str) -> int:
    """The stage of the segment with this name."""
    return int(name.removeprefix("stage").partition("_")[0])


Step = Segment | Item


@dataclass(frozen=True)
class StageItems:
    """The forward of a stage, with everything that decides its order.

    Attributes:
        plan: the decisions.
        stage: the number of the stage.
        items: the items of the forward, in one order for all devices.
        regions: by item, the group with which it is recomputed as a whole.
        taking_part: by item that communicates, the devices that take part.
        edges: the edges of the plan.
        ends: ops before which segments end although there is no communication.
        kinds: the kinds of actions that the schedule has for the stage.
    """

    plan: Plan
    stage: int
    items: Sequence[Item]
    regions: Mapping[Item, int]
    taking_part: Mapping[Step, Sequence[Device]]
    edges: Edges
    ends: Collection[Op] = ()
    kinds: frozenset[ActionKind] = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD})

    def region(self, step: Step) -> int:
        """The number of the region that contains a step; 0 if none."""
        if isinstance(step, Segment):
            return step.region
        return self.regions.get(step, 0) if self.regions else 0

    def group(self, item: Compute) -> tuple[int, int, int]:
        """The numbers of the groups with which a part is recomputed, offloaded, and in a region."""
        plan, part = self.plan, item.part
        if not self.has_groups:
            return 0, 0, 0
        return plan.recompute_group(part), plan.offload_group(part), self.region(item)

    @cached_property
    def has_groups(self) -> bool:
        """Whether any part of the plan is recomputed, offloaded or in a region."""
        return bool(self.regions) or self.plan.has_groups

    @cached_property
    def read_outside(self) -> frozenset[PTensor]:
        """Results of these items that other items of the stage read; empty if there are none."""
        ops = {item.part.op for item in self.items if isinstance(item, Compute)}
        moved = {item.edge for item in self.items if isinstance(item, MoveStep)}
        readers, of_reader = self.plan.graph.readers, self.edges.of_reader
        direct = {
            tensor
            for op in ops
            for tensor in op.outputs
            for reader in readers.get(tensor, ())
            if reader[0] not in ops and reader not in of_reader
        }
        made = {tensor for op in ops for tensor in op.outputs}
        edges = (edge for edge in self.edges.of_stage(self.stage) if edge not in moved)
        return frozenset(direct | ({edge.tensor for edge in edges} & made))
