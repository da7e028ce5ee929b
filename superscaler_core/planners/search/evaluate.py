"""Evaluate: what comes of a candidate, by the compiler, the memory reader and the simulator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import rvdcomm as rv
from superscaler_core.collector import paused_collector
from superscaler_core.compiled import Compiled, compile
from superscaler_core.cost.wire import TICKS_PER_SEC
from superscaler_core.errors import PlanError
from superscaler_core.planners.search.request import Candidate, Request, Trial, filled
from superscaler_core.schedules import GRADS, ScheduleError
from superscaler_core.simulator import Simulated, simulate
from superscaler_core.units import bytes_text

FAULTS = (PlanError, ScheduleError, rv.LayoutError, rv.MemoryLimitError)
"""What is raised for plans that cannot be; anything else is a fault of this package."""


@dataclass(frozen=True)
class Looked:
    """What was seen of a plan; as in ``Trial``, and it can be sent between processes."""

    secs: float = float("inf")
    peak_bytes: int = 0
    problem: str = ""
    is_estimate: bool = False


def evaluate(request: Request, candidate: Candidate, *, in_full: bool = True) -> Trial:
    """Compile a candidate, read its memory, and simulate it.

    Args:
        request: what is asked.
        candidate: the plan.
        in_full: all microbatches; else as few as show its pace, if it can be looked at so.
    """
    few = 0 if in_full else candidate.few
    looked = look(request, candidate.samples, candidate.sprogram, few)
    return trial_of(candidate, looked)


def trial_of(candidate: Candidate, looked: Looked) -> Trial:
    """What came of a candidate."""
    return Trial(candidate, looked.secs, looked.peak_bytes, looked.problem, looked.is_estimate)


def look(request: Request, samples: int, sprogram: Callable[..., None], few: int = 0) -> Looked:
    """The same for a candidate's parts, with ``few`` microbatches, or all if that is 0."""
    num = request.microbatches(samples)
    short = few if few < num else 0
    if gc.get_count()[0] > MAX_GARBAGE:
        gc.collect()
    with paused_collector():
        try:
            made = compiled(request, samples, sprogram, short)
            peak = max(memory.total_bytes for memory in made.memory.values())
            if peak > request.memory_bytes:
                return Looked(peak_bytes=peak, problem=lack(peak, request))
            result = simulate(made, request.profile, communication=request.communication)
        except FAULTS as error:
            return Looked(problem=str(error))
    if not short:
        return Looked(result.secs, peak)
    return Looked(result.secs + (num - short) * pace_secs(result, short), peak, is_estimate=True)


MAX_GARBAGE = 1_000_000
"""Objects that programs of earlier candidates may leave behind: some 100 MB. Collecting takes a
third of a second in a process that has torch, more than a small candidate."""


def compiled(
    request: Request, samples: int, sprogram: Callable[..., None], microbatches: int = 0
) -> Compiled:
    """The program of a candidate.

    Raises:
        PlanError: the model cannot be cut so.
    """
    return compile(
        filled(request, samples, sprogram, microbatches),
        topology=request.topology,
        optimizer=request.optimizer,
        master_dtype=request.master_dtype,
    )


def lack(num_bytes: float, request: Request) -> str:
    """What is wrong with a plan that needs too much memory."""
    return f"needs {bytes_text(num_bytes)} of {bytes_text(request.memory_bytes)}"


def pace_secs(result: Simulated, num_microbatches: int) -> float:
    """Seconds from a microbatch to the next where a pipeline is full, by its first stage.

    Args:
        result: of a step.
        num_microbatches: of that step, at least 4 for every gradient of the first stage; plans that
            weave two halves of a batch run two microbatches as one.
    """
    times = {
        ran.event.microbatch: ran.start + max(ran.inside.ends)
        for ran in result.timeline.runs
        if ran.event.kind in GRADS and ran.event.stage == 0
    }
    ends = [times[microbatch] for microbatch in sorted(times)]
    first, last = len(ends) // 2, len(ends) * 3 // 4
    num = (last - first) * num_microbatches / len(ends)
    return (ends[last] - ends[first]) / num / TICKS_PER_SEC
