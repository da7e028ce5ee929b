"""Evaluate: an evaluation of a candidate compiles it, reads its memory and simulates its step."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from rvdcomm.units import bytes_text
from superscaler_core.compiled import Compiled, compile
from superscaler_core.cost.comm_cost import comm_costs_on
from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import FULL, Candidate, Request, Scope, Trial
from superscaler_core.evaluation.shortened import NotEvenError, Short, repeats_of
from superscaler_core.graph.graph import Graph
from superscaler_core.schedules import ScheduleError
from superscaler_core.simulator import Simulated, simulate

FAULTS = (PlanError, ScheduleError, rv.LayoutError, rv.MemoryLimitError)
"""Errors of plans that are not possible; any other exception is a defect of this package."""


def evaluate(request: Request, candidate: Candidate, how: Scope = FULL) -> Trial:
    """Compile a candidate, read its memory, and simulate its step, or the part in scope."""
    start = request.clock()
    if gc.get_count()[0] > MAX_GARBAGE:
        gc.collect()
    with paused_collector():
        try:
            trial = _evaluated(request, candidate, how)
        except NotEvenError:
            trial = _evaluated(request, candidate, replace(how, stages=None))
        except FAULTS as error:
            trial = Trial(candidate, problem=str(error))
    return replace(trial, evaluation_secs=request.clock() - start)


MAX_GARBAGE = 1_000_000
"""Objects that earlier candidates may leave behind before a garbage collection: some 100 MB.

A collection takes a third of a second in a process that has torch, longer than a small candidate.
"""


def _evaluated(request: Request, candidate: Candidate, how: Scope) -> Trial:
    request = request.as_captured if how.is_exact else request
    num = request.microbatches(candidate.samples)
    few = how.rounds * how.period if how.rounds * how.period < num else 0
    short = _short(request.graph_of(candidate.samples), how)
    pairs = [None] if short is None else [*zip(short.graphs, short.sizes, strict=True)]

    def program(pair: tuple[Graph, Sequence[int]] | None, microbatches: int) -> Compiled:
        return compiled(request, candidate, microbatches=microbatches, short=pair)

    def simulated(one: Compiled) -> Simulated:
        comm_costs = comm_costs_on(request.topology, request.profile.measured)
        method = request.communication
        return simulate(one, request.profile, communication=method, comm_costs=comm_costs)

    def whole_secs(found: Iterable[Compiled]) -> float:
        secs = [simulated(one).secs for one in found]
        return secs[0] if short is None else short.at_whole(*secs)

    programs = [program(pair, few) for pair in pairs]
    peak = _peak_bytes(programs, 1 if short is None else short.steps)
    is_estimate = few > 0 or short is not None
    if peak > request.memory_bytes:
        problem = lack(peak, request)
        return Trial(candidate, peak_bytes=peak, problem=problem, is_estimate=is_estimate)
    if not is_estimate:
        whole = simulated(programs[0])
        return Trial(candidate, whole.secs, peak, breakdown=whole.breakdown)
    secs = whole_secs(programs)
    if few:
        fewer_secs = whole_secs(program(pair, few - how.period) for pair in pairs)
        secs += (num - few) * (secs - fewer_secs) / how.period
    return Trial(candidate, secs, peak, is_estimate=True)


def _peak_bytes(programs: Sequence[Compiled], steps: int) -> int:
    """Bytes on the fullest device of the whole model, from its program or two short ones.

    ``steps`` is the number of equal gains of blocks from the first short graph to the whole model.
    """
    if len(programs) == 1:
        return max(own.total_bytes for own in programs[0].memory.values())
    first, second = (one.step_peaks for one in programs)
    return max(own.grown(second[device], steps) for device, own in first.items())


def _short(graph: Graph, how: Scope) -> Short | None:
    """Two short graphs; None if all blocks are evaluated, or the model is not deep enough."""
    if how.stages is None:
        return None
    repeats = repeats_of(graph)
    return repeats.short(how.stages(repeats.blocks))


def compiled(
    request: Request,
    candidate: Candidate,
    *,
    microbatches: int = 0,
    short: tuple[Graph, Sequence[int]] | None = None,
) -> Compiled:
    """The program of a candidate; arguments and errors as of ``Candidate.plan``."""
    return compile(
        candidate.plan(request, microbatches=microbatches, short=short),
        topology=request.topology,
        optimizer=request.optimizer,
        precision=request.precision,
    )


def lack(num_bytes: float, request: Request) -> str:
    """The problem of a plan that needs more memory than a device has, as text."""
    return f"needs {bytes_text(num_bytes)} of {bytes_text(request.memory_bytes)}"
