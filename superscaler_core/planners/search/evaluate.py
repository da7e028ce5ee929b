"""Evaluate: an evaluation of a candidate compiles it, reads its memory and simulates its step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from rvdcomm.units import bytes_text
from superscaler_core.compiled import Compiled, compile
from superscaler_core.cost.comm_cost import comm_costs_on
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph
from superscaler_core.planners.search.request import (
    FULL,
    Candidate,
    Request,
    Scope,
    Trial,
    filled,
)
from superscaler_core.planners.search.shortened import NotEvenError, Short, repeats_of
from superscaler_core.schedules import ScheduleError
from superscaler_core.simulator import Breakdown, Simulated, simulate

FAULTS = (PlanError, ScheduleError, rv.LayoutError, rv.MemoryLimitError)
"""Errors of plans that are not possible; any other exception is a defect of this package."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: a ``Trial`` without its candidate, so that it can be pickled."""

    secs: float = float("inf")
    peak_bytes: int = 0
    problem: str = ""
    is_estimate: bool = False
    evaluation_secs: float = 0.0
    breakdown: Breakdown | None = None


def evaluate(request: Request, candidate: Candidate, how: Scope = FULL) -> Trial:
    """Compile a candidate, read its memory, and simulate its step.

    Args:
        request: the model, cluster and step.
        candidate: the proposed plan.
        how: which part of the step and of the model to evaluate.
    """
    return trial_of(candidate, evaluation_of(request, candidate.samples, candidate.sprogram, how))


def trial_of(candidate: Candidate, evaluation: Evaluation) -> Trial:
    """The trial of a candidate, from the result of its evaluation."""
    return Trial(
        candidate, evaluation.secs, evaluation.peak_bytes, evaluation.problem,
        evaluation.is_estimate, evaluation.evaluation_secs, evaluation.breakdown,
    )  # fmt: skip


def evaluation_of(
    request: Request, samples: int, sprogram: Callable[..., None], how: Scope = FULL
) -> Evaluation:
    """As ``evaluate``, given a candidate's microbatch size and sProgram."""
    start = time.monotonic()
    evaluation = _evaluation(request, samples, sprogram, how)
    return replace(evaluation, evaluation_secs=time.monotonic() - start)


def _evaluation(
    request: Request, samples: int, sprogram: Callable[..., None], how: Scope
) -> Evaluation:
    if gc.get_count()[0] > MAX_GARBAGE:
        gc.collect()
    with paused_collector():
        try:
            return _evaluated(request, samples, sprogram, how)
        except NotEvenError:
            return _evaluated(request, samples, sprogram, replace(how, stages=None))
        except FAULTS as error:
            return Evaluation(problem=str(error))


MAX_GARBAGE = 1_000_000
"""Objects that earlier candidates may leave behind before a garbage collection: some 100 MB.

A collection takes a third of a second in a process that has torch, longer than a small candidate.
"""


def _evaluated(
    request: Request, samples: int, sprogram: Callable[..., None], how: Scope
) -> Evaluation:
    request = request.as_captured if how.is_exact else request
    num = request.microbatches(samples)
    few = how.rounds * how.period if how.rounds * how.period < num else 0
    short = _short(request.graph_of(samples), how)
    pairs = [None] if short is None else [*zip(short.graphs, short.sizes, strict=True)]

    def made(pair: tuple[Graph, Sequence[int]] | None, microbatches: int) -> Compiled:
        return compiled(request, samples, sprogram, microbatches=microbatches, short=pair)

    def simulated(one: Compiled) -> Simulated:
        comm_costs, method = comm_costs_on(request.topology), request.communication
        return simulate(one, request.profile, communication=method, comm_costs=comm_costs)

    def secs_of(one: Compiled) -> float:
        return simulated(one).secs

    programs = [made(pair, few) for pair in pairs]
    at_whole = _alone if short is None else short.at_whole
    peak = _peak_bytes(programs, 1 if short is None else short.steps)
    is_estimate = few > 0 or short is not None
    if peak > request.memory_bytes:
        return Evaluation(peak_bytes=peak, problem=lack(peak, request), is_estimate=is_estimate)
    if not is_estimate:
        whole = simulated(programs[0])
        return Evaluation(whole.secs, peak, breakdown=whole.breakdown)
    secs = at_whole(*map(secs_of, programs))
    if few:
        fewer_secs = at_whole(*(secs_of(made(pair, few - how.period)) for pair in pairs))
        secs += (num - few) * (secs - fewer_secs) / how.period
    return Evaluation(secs, peak, is_estimate=True)


def _peak_bytes(programs: Sequence[Compiled], steps: int) -> int:
    """Bytes on the fullest device of the whole model.

    Args:
        programs: the program of the whole model, or the programs of two short graphs.
        steps: equal increments of blocks from the first short graph to the whole model.
    """
    if len(programs) == 1:
        return max(own.total_bytes for own in programs[0].memory.values())
    first, second = (one.step_peaks for one in programs)
    return max(own.grown(second[device], steps) for device, own in first.items())


def _alone(figure: float) -> float:
    """The figure itself: with one program there is nothing to extrapolate."""
    return figure


def _short(graph: Graph, how: Scope) -> Short | None:
    """Two short graphs; None if all blocks are evaluated, or the model is not deep enough."""
    if how.stages is None:
        return None
    repeats = repeats_of(graph)
    return repeats.short(how.stages(repeats.blocks))


def compiled(
    request: Request,
    samples: int,
    sprogram: Callable[..., None],
    *,
    microbatches: int = 0,
    short: tuple[Graph, Sequence[int]] | None = None,
) -> Compiled:
    """The program of a candidate; arguments as in ``filled``.

    Raises:
        PlanError: the sProgram cannot cut this model.
    """
    return compile(
        filled(request, samples, sprogram, microbatches=microbatches, short=short),
        topology=request.topology,
        optimizer=request.optimizer,
        precision=request.precision,
    )


def lack(num_bytes: float, request: Request) -> str:
    """The problem of a plan that needs more memory than a device has, as text."""
    return f"needs {bytes_text(num_bytes)} of {bytes_text(request.memory_bytes)}"
