"""Request, Candidate and Trial: what a planner is asked, what it answers, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import rvdcomm as rv
from superscaler_core.cost import CostModel, DeviceProfile
from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks
from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Device, Plan
from superscaler_core.schedules import nf1b, one_f_one_b


@dataclass(frozen=True, eq=False)
class Request:
    """A model, a cluster, and what a step is.

    Attributes:
        graph_of: the model with a microbatch of so many samples.
        samples: the sizes of microbatches that may be asked for, ascending; all divide ``batch``.
        batch: samples of a step.
        devices: those that may be used.
        topology: with these devices.
        profile: of every device.
        memory_bytes: of a device; no plan may need more.
        optimizer, master_dtype: as in ``compile``.
        recycle: turns without gradient of every microbatch, for a model that is recycled.
        communication: how tensors move, as in ``simulate``.
        captured: the same as ``graph_of``, captured with just that size, if ``graph_of`` is not
            (``resized``); what is found is looked at on these graphs. None if it is.
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
    recycle: int = 0
    communication: str = "rvd"
    captured: Callable[[int], Graph] | None = None

    def __post_init__(self) -> None:
        wrong = [each for each in self.samples if each < 1 or self.batch % each]
        if wrong or not self.samples:
            raise PlanError(
                f"microbatches of {', '.join(map(str, wrong or self.samples)) or 'no'} samples for "
                f"a step of {self.batch}: give one at least, and divisors of {self.batch}."
            )

    @property
    def as_captured(self) -> Request:
        """The same on graphs that are captured."""
        if self.captured is None:
            return self
        return replace(self, graph_of=self.captured, captured=None)

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


def nothing_more(trial: Trial) -> Iterable[Candidate]:
    """Follow a candidate by none."""
    return ()


@dataclass(frozen=True)
class Look:
    """How small a look at a candidate is; what is left out is added at the pace of the rest.

    Attributes:
        period: of microbatches, after which a pipeline that is full does the same again. Some
            periods are looked at; ``sprogram`` then takes the number of their microbatches as
            ``microbatches``. If 0, all are looked at.
        stages: how many of a model's blocks each stage has, of which all lose as many, and
            ``sprogram`` then takes what is left as ``sizes``. If None, all blocks are looked at.
        is_exact: whether it is at the graph that is captured (``Request.captured``).
    """

    period: int = 0
    stages: Callable[[Blocks], Sequence[int]] | None = None
    is_exact: bool = False


WHOLE, EXACT = Look(), Look(is_exact=True)
"""All microbatches and all blocks, and that of the graph as captured."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a planner proposes; it is filled only when it is looked at.

    Attributes:
        name: its knobs, for people; distinct in a planner's answers.
        samples: of a microbatch.
        sprogram: fills a new plan of ``Request.graph_of(samples)``. If it orders no stages, the
            plan does its microbatches one after another. One that can be pickled may be looked at
            in another process.
        bound_secs: a lower bound of its step by the planner; 0 if it knows none.
        guess_secs: an estimate of its step, for the order of looking; the bound if 0.
        least_bytes: a lower bound of the memory of its fullest device; 0 if the planner knows none.
        cost: what looking at it takes, in looks at usual ones.
        look: how small a look shows its pace, with which it is looked at first.
        follow: what to look at after it, given what came of it; asked after every look at it, so
            after a small one and the whole.
    """

    name: str
    samples: int
    sprogram: Callable[..., None]
    bound_secs: float = 0.0
    guess_secs: float = 0.0
    least_bytes: float = 0.0
    cost: float = 1.0
    look: Look = WHOLE
    follow: Callable[[Trial], Iterable[Candidate]] = nothing_more

    def plan(self, request: Request) -> Plan:
        """The filled plan.

        Args:
            request: whose graph it is of.

        Raises:
            PlanError: the model cannot be cut so.
        """
        return filled(request, self.samples, self.sprogram)


def filled(
    request: Request,
    samples: int,
    sprogram: Callable[..., None],
    *,
    microbatches: int = 0,
    short: tuple[Graph, Sequence[int]] | None = None,
) -> Plan:
    """A plan of a candidate's sProgram.

    Args:
        request: of the candidate.
        samples, sprogram: those of the candidate.
        microbatches: of a shorter step; those of the request if 0.
        short: a graph of fewer blocks, and how many of them each stage has; that of the request if
            None.

    Raises:
        PlanError: the model cannot be cut so.
    """
    graph, sizes = (request.graph_of(samples), ()) if short is None else short
    plan = Plan(graph, request.devices)
    given = {"microbatches": microbatches, "sizes": sizes}
    sprogram(plan, **{name: value for name, value in given.items() if value})
    num = microbatches or request.microbatches(samples)
    if plan.schedule is None and (num > 1 or request.recycle):
        scheduled = num // plan.overlap.num_halves
        recycle = request.recycle
        plan.op_order(nf1b(1, scheduled, recycle) if recycle else one_f_one_b(1, scheduled))
    if plan.num_microbatches != num:
        raise PlanError(
            f"a step of {request.batch} samples has {num} microbatches of {samples}, and the plan "
            f"has {plan.num_microbatches}."
        )
    turns = num * request.recycle
    if plan.num_turns != turns:
        raise PlanError(
            f"a step has {turns} turns without gradient, {request.recycle} a microbatch, and "
            f"the plan has {plan.num_turns}."
        )
    return plan


@dataclass(frozen=True, eq=False)
class Trial:
    """What came of a candidate.

    Attributes:
        candidate: the same.
        secs: of a step by the simulator; infinite if it cannot be.
        peak_bytes: of the fullest device; 0 if it is not known.
        problem: why it cannot be; empty if it can.
        is_estimate: whether only few microbatches or blocks were simulated, and the rest added at
            their pace.
        look_secs: how long looking at it took.
    """

    candidate: Candidate
    secs: float = inf
    peak_bytes: int = 0
    problem: str = ""
    is_estimate: bool = False
    look_secs: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it can be."""
        return not self.problem

    @property
    def lacks_memory(self) -> bool:
        """Whether it cannot be for its memory alone."""
        return bool(self.problem and self.peak_bytes)


SearchPlanner = Callable[[Request], Iterable[Candidate]]
"""Proposes plans, better ones first if it knows."""
