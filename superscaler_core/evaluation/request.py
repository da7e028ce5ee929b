"""Request, Candidate and Trial: a planner's task, its proposals, and their evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import rvdcomm as rv
from superscaler_core.checks import one_of
from superscaler_core.cost import CostModel, DeviceProfile
from superscaler_core.errors import PlanError
from superscaler_core.evaluation.microbatches import Captured, GraphOf
from superscaler_core.graph.blocks import Blocks
from superscaler_core.graph.graph import Graph
from superscaler_core.memory import STATES
from superscaler_core.plan import Device, Plan
from superscaler_core.precision import Precision
from superscaler_core.schedules import nf1b, one_f_one_b
from superscaler_core.simulator.account import Breakdown


@dataclass(frozen=True, eq=False)
class Request:
    """The task of a search: a model, a cluster, and the batch of a step.

    Attributes:
        graph_of: from the samples of a microbatch to the model's graph.
        samples: microbatch sizes that may be asked for, ascending; all divide ``batch``.
        batch: samples per step.
        devices: devices that may be used; ``topology`` has their hosts and links.
        profile, memory_bytes: profile and memory of every device.
        optimizer, precision: as in ``compile``.
        recycle: forwards without gradient per microbatch, for a model that recycles its results.
        communication: how tensors move, as in ``simulate``.
        captured: the captured graphs, on which the chosen plan is checked. None if ``graph_of``
            itself never resizes (``resized``).
        max_tried: the budget in evaluations, as in ``search``; 0 if it is one in seconds.
        clock: gives the seconds by which budgets and evaluations are counted. By
            ``time.process_time``, which suits a search of one process, other work of the machine
            does not count.

    Raises:
        PlanError: no microbatch size, or one that does not divide the batch; no devices, or not
            those of the topology; no memory; an optimizer or a dtype that is not known.
    """

    graph_of: GraphOf
    samples: tuple[int, ...]
    batch: int
    devices: tuple[Device, ...]
    topology: rv.Topology
    profile: DeviceProfile
    memory_bytes: int
    optimizer: str = "adam"
    precision: Precision = Precision()
    recycle: int = 0
    communication: str = "rvd"
    captured: Captured | None = None
    max_tried: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        wrong = [each for each in self.samples if each < 1 or self.batch % each]
        if wrong or not self.samples:
            raise PlanError(
                f"microbatches of {', '.join(map(str, wrong or self.samples)) or 'no'} samples for "
                f"a step of {self.batch}: give one at least, and divisors of {self.batch}."
            )
        ranks = self.topology.ranks
        strange = [each for each in self.devices if each not in ranks]
        if strange or not self.devices or len({*self.devices}) < len(self.devices):
            raise PlanError(
                f"devices {', '.join(map(str, self.devices)) or 'none'}: give one at least, each "
                f"once, out of the topology's {min(ranks)} to {max(ranks)}."
            )
        if self.memory_bytes < 1:
            raise PlanError(f"memory of {self.memory_bytes} bytes: a device has 1 or more.")
        one_of("optimizer", self.optimizer, STATES)

    @property
    def as_captured(self) -> Request:
        """This request with captured graphs instead of resized ones."""
        if self.captured is None:
            return self
        return replace(self, graph_of=self.captured, captured=None)

    def check_secs(self, samples: int) -> float:
        """Seconds that checking a plan with this microbatch size takes: those of a capture."""
        if self.captured is None or samples in self.captured.sizes:
            return 0.0
        return self.captured.secs

    def microbatches(self, samples: int) -> int:
        """The number of microbatches per step, if each has ``samples`` samples."""
        return self.batch // samples

    def costs(self, samples: int) -> CostModel:
        """The cost functions of a microbatch of ``samples`` samples."""
        return self.costs_of(self.graph_of(samples))

    def costs_of(self, graph: Graph) -> CostModel:
        """The cost functions of a graph, on the cluster of the request."""
        return CostModel(
            graph,
            self.profile,
            self.topology,
            optimizer=self.optimizer,
            precision=self.precision,
        )


def nothing_more(trial: Trial) -> Iterable[Candidate]:
    """The default of ``Candidate.follow``: no more candidates."""
    return ()


@dataclass(frozen=True)
class Scope:
    """The part of a candidate that is compiled and simulated; the rest is extrapolated.

    Attributes:
        period: microbatches after which a full pipeline repeats its pattern. Only a few periods are
            simulated; ``sprogram`` then takes their microbatches as ``microbatches``. If 0, all
            microbatches are simulated.
        rounds: number of the simulated periods. A second run with one period less gives the time
            per period, so the pipeline has to repeat its pattern after ``rounds - 1`` periods.
        stages: from a model's blocks to the number of blocks of each stage. Every stage then loses
            equally many; ``sprogram`` takes the remaining numbers as ``sizes``. If None, no block
            is left out.
        is_exact: whether the graph is the captured one (``Request.captured``).
    """

    period: int = 0
    rounds: int = 3
    stages: Callable[[Blocks], Sequence[int]] | None = None
    is_exact: bool = False


FULL, EXACT = Scope(), Scope(is_exact=True)
"""Scopes of all microbatches and all blocks; ``EXACT`` uses the captured graph."""


KINDS = ("ZeRO 1", "ZeRO 3", "tensor parallel", "pipeline")
"""Kinds of plans of which people ask why one was not chosen."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that a planner proposes; the plan is filled only when it is evaluated.

    Attributes:
        name: the plan's options as text; unique among the candidates of a planner.
        samples: samples of a microbatch.
        sprogram: fills a new plan of ``Request.graph_of(samples)``. If it sets no schedule, the
            microbatches run one after another. If it can be pickled, another process may evaluate
            the candidate.
        bound_secs: the planner's lower bound of the step time; 0 if it knows none.
        guess_secs: an estimate of the step time that orders the evaluations; if 0, the bound is
            used.
        least_bytes: a lower bound of the bytes on the fullest device; 0 if the planner knows none.
        quick: the scope of the evaluation with which the search begins; ``FULL`` if there is none.
        follow: from a trial of the candidate to the candidates to evaluate next; called after the
            quick evaluation and after the full one.
        kinds: the kinds of plans that it is an example of, among ``KINDS``.
    """

    name: str
    samples: int
    sprogram: Callable[..., None]
    bound_secs: float = 0.0
    guess_secs: float = 0.0
    least_bytes: float = 0.0
    quick: Scope = FULL
    follow: Callable[[Trial], Iterable[Candidate]] = nothing_more
    kinds: frozenset[str] = frozenset()

    def plan(
        self,
        request: Request,
        *,
        microbatches: int = 0,
        short: tuple[Graph, Sequence[int]] | None = None,
    ) -> Plan:
        """A new plan, filled by the sProgram.

        Args:
            request: the request that the candidate answers.
            microbatches: microbatches of a shortened step; that of the request if 0.
            short: a graph with fewer blocks, and the number of blocks of each stage; the whole
                graph of the request if None.

        Raises:
            PlanError: the sProgram cannot cut this model, or the plan has another number of
                microbatches or of recycling passes than the request.
        """
        graph, sizes = (request.graph_of(self.samples), ()) if short is None else short
        plan, recycle = Plan(graph, request.devices), request.recycle
        given = {"microbatches": microbatches, "sizes": sizes}
        self.sprogram(plan, **{name: value for name, value in given.items() if value})
        num = microbatches or request.microbatches(self.samples)
        if plan.schedule is None and (num > 1 or recycle):
            scheduled = num // plan.overlap.num_halves
            plan.op_order(nf1b(1, scheduled, recycle) if recycle else one_f_one_b(1, scheduled))
        if plan.num_microbatches != num:
            raise PlanError(
                f"a step of {request.batch} samples has {num} microbatches of {self.samples}, and "
                f"the plan has {plan.num_microbatches}."
            )
        if plan.num_recycling_passes != num * recycle:
            raise PlanError(
                f"a step has {num * recycle} recycling passes, {recycle} a microbatch, and "
                f"the plan has {plan.num_recycling_passes}."
            )
        return plan


@dataclass(frozen=True, eq=False)
class Trial:
    """The result of one evaluation of a candidate.

    Attributes:
        candidate: the candidate.
        secs: simulated seconds of a step; infinite if the plan is not possible.
        peak_bytes: bytes on the fullest device; 0 if unknown.
        problem: why the plan is not possible; empty if it is.
        is_estimate: whether only a few microbatches or blocks were simulated.
        evaluation_secs: seconds that the evaluation took.
        breakdown: where the time and the memory of the step go, if all of it was simulated.
    """

    candidate: Candidate
    secs: float = inf
    peak_bytes: int = 0
    problem: str = ""
    is_estimate: bool = False
    evaluation_secs: float = 0.0
    breakdown: Breakdown | None = None

    @property
    def fits(self) -> bool:
        """Whether the plan is possible and fits in memory."""
        return not self.problem

    @property
    def lacks_memory(self) -> bool:
        """Whether too little memory is the only reason why the plan is not possible."""
        return bool(self.problem and self.peak_bytes)


SearchPlanner = Callable[[Request], Iterable[Candidate]]
"""A planner: from a request to candidates, the most promising first if the planner knows."""
