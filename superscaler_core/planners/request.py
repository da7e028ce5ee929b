"""Request and Candidate: what a planner is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import rvdcomm as rv
from superscaler_core.cost import CostModel, DeviceProfile
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Device, Plan


@dataclass(frozen=True, eq=False)
class Request:
    """A model, a cluster, and what a step is.

    Attributes:
        graph_of: the model captured with a microbatch of so many samples.
        samples: the sizes of microbatches that may be asked for, ascending; all divide ``batch``.
        batch: samples of a step.
        devices: those that may be used.
        topology: with these devices.
        profile: of every device.
        memory_bytes: of a device; no plan may need more.
        optimizer, master_dtype: as in ``compile``.
    """

    graph_of: Callable[[int], Graph]
    samples: tuple[int, ...]
    batch: int
    devices: tuple[Device, ...]
    topology: rv.Topology
    profile: DeviceProfile
    memory_bytes: int
    optimizer: str = "adam"
    master_dtype: str | None = None

    def __post_init__(self) -> None:
        wrong = [each for each in self.samples if each < 1 or self.batch % each]
        if wrong or not self.samples:
            raise PlanError(
                f"microbatches of {', '.join(map(str, wrong or self.samples)) or 'no'} samples for "
                f"a step of {self.batch}: give one at least, and divisors of {self.batch}."
            )

    def microbatches(self, samples: int) -> int:
        """How many microbatches of so many samples a step has."""
        return self.batch // samples

    def costs(self, samples: int) -> CostModel:
        """The cost functions of a microbatch of so many samples."""
        return CostModel(
            self.graph_of(samples),
            self.profile,
            self.topology,
            optimizer=self.optimizer,
            master_dtype=self.master_dtype,
        )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a planner proposes; it is filled only when it is looked at.

    Attributes:
        name: its knobs, for people; distinct in a planner's answers.
        samples: of a microbatch.
        sprogram: fills a new plan of ``Request.graph_of(samples)``.
        bound_secs: a lower bound of its step by the planner; 0 if it knows none.
    """

    name: str
    samples: int
    sprogram: Callable[[Plan], None]
    bound_secs: float = 0.0

    def plan(self, request: Request) -> Plan:
        """The filled plan.

        Raises:
            PlanError: the model cannot be cut so.
        """
        plan = Plan(request.graph_of(self.samples), request.devices)
        self.sprogram(plan)
        return plan


SearchPlanner = Callable[[Request], Iterable[Candidate]]
"""Proposes plans, better ones first if it knows."""
