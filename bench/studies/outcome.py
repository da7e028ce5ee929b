"""Outcome: what one way of a system comes to on one workload, by simulation."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import superscaler_core as ss
from bench.studies import cluster
from bench.studies.systems import System, Way
from bench.studies.workload import Workload, compiled, kept_bytes, num_parameters
from superscaler_core.collector import paused_collector
from superscaler_core.planners.search.evaluate import pace_secs
from superscaler_core.simulator import simulate

FEW = 4
"""Microbatches for every GPU that an estimate simulates."""


@dataclass(frozen=True)
class Outcome:
    """One way of a system on one workload.

    Attributes:
        system, way: which, with what saves memory.
        microbatch: samples of a microbatch, all replicas together.
        num_microbatches: of a step.
        problem: why it cannot be; empty if it can.
        is_estimate: whether only some microbatches were simulated, and the rest added at the pace
            of these; so all ways are ranked, and the best is simulated in full.
        secs: of a step.
        samples_per_sec: of training.
        peak_bytes: of the fullest device, by kind; of what does not fit too. What was not planned
            has one number, a bound from below on all kinds together.
        shares: of the step that devices compute, communicate (exposed) and wait, mean of devices.
        levels: communication by level: bytes sent, and seconds a device.
    """

    system: str
    way: Way
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
        """As a JSON object; of the way what ``compiled`` needs, and its text."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        way = {"way": str(self.way), "dp": self.way.dp, "knobs": dict(self.way.knobs)}
        return {**values, **way}


def outcome_of(
    workload: Workload,
    num_gpus: int,
    system: System,
    way: Way,
    microbatch: int,
    *,
    in_full: bool = False,
) -> Outcome:
    """One way with one size of microbatches: whether it fits, and what it takes."""
    num = workload.batch // microbatch
    # A pipeline of as many stages is full, and in its pace, after half of these.
    short = num if in_full else min(num, FEW * num_gpus)
    head = Outcome(system.name, way, microbatch, num, is_estimate=short < num)
    least = _least_bytes(workload, way, num_gpus, microbatch)
    if least > cluster.limit_bytes():
        problem = f"needs at least {least / 2**30:.1f} GiB"
        return replace(head, problem=problem, peak_bytes={"at least": least})
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


def hopeless(workload: Workload, way: Way) -> str:
    """Whether weights, gradients and states alone are too much, which needs no plan to see."""
    each = _stored_bytes(workload, way)
    if each > cluster.limit_bytes():
        return f"weights and states alone need {each / 2**30:.1f} GiB"
    return ""


def _stored_bytes(workload: Workload, way: Way) -> int:
    """Weights, gradients and states on a device."""
    if way.on_host:
        return 0
    is_half = workload.dtype == "float16"
    # A weight and its gradient in float32; Adam's two states, with a master weight of a half.
    here, stored = (6, 12) if is_half else (8, 8)
    each = here / way.splits + stored / (way.state_splits or way.splits)
    return int(num_parameters(workload) * each)


def _least_bytes(workload: Workload, way: Way, num_gpus: int, microbatch: int) -> int:
    """A bound from below on the memory of the fullest device, which needs no plan either.

    When a microbatch has ended its forward, all that its backward needs is on some device.
    """
    if any(way.knobs.get(name) for name in ("recompute", "rerun", "coshard")):
        return 0
    return _stored_bytes(workload, way) + kept_bytes(workload, microbatch) // num_gpus


def _simulated(program: ss.Compiled, workload: Workload, head: Outcome) -> Outcome:
    """What comes out for one program."""
    result = simulate(program, cluster.profile())
    num, secs = len(result.devices), result.secs
    left = head.num_microbatches - program.plan.num_microbatches
    if left:
        secs += left * pace_secs(result, program.plan.num_microbatches)
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
