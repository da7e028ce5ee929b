"""Tuning: every way of a system simulated, and the best that fits in memory."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

import superscaler_core as ss
from bench.studies import captures, cluster
from bench.studies.systems import Ladder, System, Way
from superscaler_core.collector import paused_collector
from superscaler_core.models import MODELS
from superscaler_core.simulator import Simulated, simulate
from superscaler_core.simulator.wire import TICKS_PER_SEC

MICROBATCHES = (1, 2, 4, 8, 16)
"""Samples of a microbatch and replica that are tried, ascending."""

FEW = 4
"""Microbatches for every GPU that an estimate simulates."""


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: a name of ``MODELS``.
        sizes: of it.
        dtype: of weights and activations; states and gradients are in float32.
        batch: samples of a step.
    """

    model: str
    sizes: Mapping[str, Any]
    dtype: str
    batch: int


@dataclass(frozen=True)
class Outcome:
    """One way of a system on one workload.

    Attributes:
        system, way: which; ``dp`` and ``knobs`` are the way in full.
        microbatch: samples of a microbatch, all replicas together.
        num_microbatches: of a step.
        problem: why it cannot be; empty if it can.
        is_estimate: whether only some microbatches were simulated, and the rest added at the pace
            of these; so all ways are ranked, and the best is simulated in full.
        secs: of a step.
        samples_per_sec: of training.
        peak_bytes: of the fullest device, by kind; of what does not fit too.
        shares: of the step that devices compute, communicate (exposed) and wait, mean of devices.
        levels: communication by level: bytes sent, and seconds a device.
    """

    system: str
    way: str
    dp: int
    knobs: Mapping[str, Any]
    microbatch: int = 0
    num_microbatches: int = 0
    problem: str = ""
    is_estimate: bool = False
    secs: float = 0.0
    samples_per_sec: float = 0.0
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def lacks_memory(self) -> bool:
        """Whether it cannot be for its memory alone."""
        return bool(self.problem and self.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@lru_cache
def _num_parameters(model: str, sizes: tuple[tuple[str, Any], ...]) -> int:
    kind = MODELS[model]
    with torch.device("meta"):
        module = kind.build(kind.config(**dict(sizes)))
    return sum(parameter.numel() for parameter in module.parameters())


def captured(workload: Workload, batch: int) -> ss.Graph:
    """The model with a microbatch of so many samples."""
    sizes = tuple(workload.sizes.items())
    return captures.captured(workload.model, sizes, workload.dtype, batch)


def compiled(
    workload: Workload,
    num_gpus: int,
    sprogram: Callable[..., None],
    way: Way,
    microbatch: int,
    num_microbatches: int = 0,
) -> ss.Compiled:
    """The program of one way, for the whole batch or fewer microbatches.

    Raises:
        PlanError: the model cannot be cut so.
    """
    plan = ss.Plan(captured(workload, microbatch), range(num_gpus))
    sprogram(plan, microbatches=num_microbatches or workload.batch // microbatch, **way.knobs)
    return ss.compile(
        plan,
        topology=cluster.topology(num_gpus),
        optimizer="adam",
        master_dtype="float32",
    )


def outcomes(workload: Workload, num_gpus: int, system: System) -> Iterator[Outcome]:
    """Every way of a system that may fit, and at last the fastest of them in full."""
    found = []
    for outcome in _estimates(workload, num_gpus, system):
        found.append(outcome)
        yield outcome
    for outcome in sorted(found, key=lambda o: -o.samples_per_sec):
        if outcome.problem or not outcome.is_estimate:
            return
        way = Way(outcome.dp, outcome.knobs)
        full = _outcome(workload, num_gpus, system, way, outcome.microbatch, in_full=True)
        yield full
        if not full.problem:
            return


def _estimates(workload: Workload, num_gpus: int, system: System) -> Iterator[Outcome]:
    """Every way of a system that may fit."""
    any_fits = False
    for way in sorted(system.ways(num_gpus), key=lambda way: way.is_last_resort):
        if way.is_last_resort and any_fits:
            return
        problem = _hopeless(workload, way)
        if problem:
            yield Outcome(
                system.name, way.knobs_text(way.knobs), way.dp, way.knobs, problem=problem
            )
            continue
        for ladder in way.ladders:
            found = list(_staircase(workload, num_gpus, system, way, ladder))
            yield from found
            if not all(outcome.problem for outcome in found):
                any_fits = True
                break


def _staircase(
    workload: Workload, num_gpus: int, system: System, way: Way, ladder: Ladder
) -> Iterator[Outcome]:
    """Microbatches of growing size, each with the first rung of a ladder that fits.

    Larger microbatches fit on higher rungs, or the same, so lower ones are not tried again. Who
    stays on a rung and gets no faster goes no further.
    """
    before, rung = 0.0, 0
    for samples in MICROBATCHES:
        microbatch = samples * way.dp
        if workload.batch % microbatch:
            return
        tried, fitting = _climb(workload, num_gpus, system, way, ladder[rung:], microbatch)
        yield from tried
        if fitting is None or (not fitting and tried[-1].samples_per_sec <= before):
            return
        before, rung = tried[-1].samples_per_sec, rung + fitting


def _climb(
    workload: Workload, num_gpus: int, system: System, way: Way, ladder: Ladder, microbatch: int
) -> tuple[list[Outcome], int | None]:
    """What was tried to find the first rung that fits, that one last; and which, if there is."""
    tried: dict[int, Outcome] = {}

    def has_memory(rung: int) -> bool:
        chosen = replace(way, knobs={**way.knobs, **ladder[rung]})
        tried[rung] = _outcome(workload, num_gpus, system, chosen, microbatch)
        return not tried[rung].lacks_memory

    # Most stay where they are. What cannot be cut so finely is left to lower rungs.
    first = 0 if has_memory(0) else bisect_left(range(len(ladder)), True, lo=1, key=has_memory)
    last = tried.pop(first, None)
    if last is None:
        return list(tried.values()), None
    return [*tried.values(), last], None if last.problem else first


def _outcome(
    workload: Workload,
    num_gpus: int,
    system: System,
    way: Way,
    microbatch: int,
    *,
    in_full: bool = False,
) -> Outcome:
    """One way with one size of microbatches: whether it fits, and what it takes."""
    text, num = way.knobs_text(way.knobs), workload.batch // microbatch
    # A pipeline of as many stages is full, and in its pace, after half of these.
    short = num if in_full else min(num, FEW * num_gpus)
    head = Outcome(system.name, text, way.dp, dict(way.knobs), microbatch, num, "", short < num)
    gc.collect()
    with paused_collector():
        try:
            program = compiled(workload, num_gpus, system.sprogram, way, microbatch, short)
        except (ss.PlanError, ss.OrderError, ss.ScheduleError) as error:
            return replace(head, problem=str(error))
        fullest = max(program.memory.values(), key=lambda memory: memory.total_bytes)
        need = fullest.total_bytes
        if need > cluster.limit_bytes():
            problem = f"needs {need / 2**30:.1f} GiB"
            return replace(head, problem=problem, peak_bytes=fullest.by_kind)
        return _simulated(program, workload, head)


def _hopeless(workload: Workload, way: Way) -> str:
    """Whether weights, gradients and states alone are too much, which needs no plan to see."""
    params = _num_parameters(workload.model, tuple(workload.sizes.items()))
    is_half = workload.dtype == "float16"
    # A weight and its gradient in float32; Adam's two states, with a master weight of a half.
    here, stored = (6, 12) if is_half else (8, 8)
    each = params * (here / way.splits + stored / (way.state_splits or way.splits))
    if not way.on_host and each > cluster.limit_bytes():
        return f"weights and states alone need {each / 2**30:.1f} GiB"
    return ""


def _simulated(program: ss.Compiled, workload: Workload, head: Outcome) -> Outcome:
    """What comes out for one program."""
    result = simulate(program, cluster.profile())
    num, secs = len(result.devices), result.secs
    left = head.num_microbatches - program.plan.num_microbatches
    if left:
        secs += left * _pace_secs(result, program.plan.num_microbatches)
    fullest = max(result.devices, key=lambda d: sum(result.memory[d].values()))
    parts = {
        "compute": result.compute_secs,
        "communication": result.communication_secs,
        "bubble": result.bubble_secs,
    }
    return replace(
        head,
        secs=secs,
        samples_per_sec=workload.batch / secs,
        peak_bytes=dict(result.memory[fullest]),
        shares={name: sum(by.values()) / num / result.secs for name, by in parts.items()},
        levels={level.name: (level.sent_bytes, level.secs) for level in result.levels},
    )


def _pace_secs(result: Simulated, num_microbatches: int) -> float:
    """Seconds from a microbatch to the next where a pipeline is full, by its first stage."""
    ends = {
        ran.event.microbatch: ran.start + max(ran.inside.ends)
        for ran in result.timeline.runs
        if (ran.event.kind, ran.event.stage) == ("B", 0)
    }
    first, last = num_microbatches // 2, num_microbatches * 3 // 4
    return (ends[last] - ends[first]) / (last - first) / TICKS_PER_SEC


def best(found: list[Outcome]) -> Outcome | None:
    """The fastest that fits, of those that were simulated in full."""
    full = (o for o in found if not o.problem and not o.is_estimate)
    return max(full, key=lambda o: o.samples_per_sec, default=None)
