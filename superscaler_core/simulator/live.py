"""Live: the memory of devices over a step, and the peak of each kind."""

from __future__ import annotations

from collections.abc import Mapping

from rvdcomm.collector import paused_collector
from superscaler_core.compiled import Compiled
from superscaler_core.cost.comm_cost import TICKS_PER_SEC
from superscaler_core.memory.footprint import footprints
from superscaler_core.plan import Device
from superscaler_core.schedules import Action
from superscaler_core.simulator.timeline import StepTimeline

NAMES = {"grads": "gradients"}
"""Kinds of memory that are named differently here."""


Series = tuple[tuple[float, int], ...]
"""Pairs of time in seconds from the step's start, and bytes from then on."""


def peaks_of(compiled: Compiled) -> dict[Device, dict[str, int]]:
    """The peak, by device and kind; ``"host"`` is host memory."""
    return {
        device: {NAMES.get(kind, kind): size for kind, size in memory.by_kind.items()}
        | ({"host": memory.host_bytes} if memory.host_bytes else {})
        for device, memory in compiled.memory.items()
    }


@paused_collector()
def live_of(compiled: Compiled, timeline: StepTimeline) -> Mapping[Device, Series]:
    """Bytes over time: the peak of each run of a stage, then what it keeps; with all weights."""
    made = compiled.materialized
    prints = {d: footprints(made, d, compiled.precision) for d in timeline.devices}
    now = {
        device: memory.weights_bytes + memory.grads_bytes + memory.optimizer_bytes
        for device, memory in compiled.memory.items()
    }
    found = {device: [(0.0, size)] for device, size in now.items()}
    for ran in timeline.runs:
        if not isinstance(ran.event, Action):
            continue
        key = ran.event.kind, ran.event.stage
        for device, end in zip(ran.inside.devices, ran.inside.ends, strict=True):
            footprint = prints[device].get(key)
            if footprint is None:
                continue
            most, kept = footprint.most, footprint.kept
            peak = now[device] + most.activations + most.buffers
            now[device] += kept.activations + kept.buffers
            found[device].append((ran.start / TICKS_PER_SEC, peak))
            found[device].append(((ran.start + end) / TICKS_PER_SEC, now[device]))
    return {device: tuple(series) for device, series in found.items()}
