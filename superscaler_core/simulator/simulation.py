"""Simulate: time and memory of a program's step on any topology, without running it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tqdm import tqdm

import rvdcomm as rv
from superscaler_core.collector import paused_collector
from superscaler_core.compiled import Compiled
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.cost.presets import profile_of
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.wire import METHODS, TICKS_PER_SEC, Wires, topology_for
from superscaler_core.errors import PlanError
from superscaler_core.memory import STATES
from superscaler_core.memory.stored import Stored, StoredMemory
from superscaler_core.plan import Device
from superscaler_core.schedules import ActionKind
from superscaler_core.simulator.cores import on_cores
from superscaler_core.simulator.live import live_of, peaks_of
from superscaler_core.simulator.simulated import Simulated
from superscaler_core.simulator.timeline import Stepper, StepTimeline
from superscaler_core.simulator.work import Methods, Work

ASSUMED = (
    "an op takes its operations or its memory traffic, whichever is longer, and its launch; views "
    "take nothing; a backward computes as much as the forward for every gradient",
    "calls of communication take their plan's time, all groups at once; tensors of one call pay "
    "its latency once; all that take part begin when the last is there",
    "what hosts share (NICs) serves in the program's order, later calls in the time that is left; "
    "tensors between stages share the links of their devices, other calls have them alone",
    "tensors between stages travel while devices compute, from when both ends come to them; "
    "computing is not slowed by communication",
)

HALVES = (
    "an op with gradients of its inputs and of its weights takes half of its backward for either"
)
"""Further assumption if a schedule splits backwards into halves."""


@paused_collector()
def simulate(
    compiled: Compiled,
    profile: DeviceProfile | str,
    topology: rv.Topology | None = None,
    *,
    communication: str = "rvd",
    intra: str | None = None,
    inter: str | None = None,
) -> Simulated:
    """Simulate a training step: time, bubble, communication and memory.

    Args:
        compiled: the program.
        profile: profile of every device, or a preset's name, one of ``simulator.PROFILES``.
        topology: hosts and links; the topology that the program was compiled for if None.
        communication: "rvd": by rvdcomm's plans; "ring": by plans that know no hosts, whose
            collectives go around a flat ring of their ranks; or "p2p": every reader pulls what it
            needs from its writers, with one message each.
        intra: overrides ``communication`` inside stages, including weights and gradients.
        inter: overrides ``communication`` between stages.

    Raises:
        PlanError: there is no such profile or method, or the topology lacks a device.
    """
    methods = Methods(intra or communication, inter or communication)
    if isinstance(profile, str):
        profile = profile_of(profile)
    made = compiled.materialized
    played = _play(compiled, profile, topology, methods)
    update_secs = played.update_secs
    if made.is_asynchronous and made.plan.schedule is not None:
        num_updates = made.plan.num_microbatches // made.plan.schedule.microbatches_per_update
        update_secs = {device: secs * num_updates for device, secs in update_secs.items()}
    has_halves = any(ActionKind.INPUTS in kinds for kinds in made.stage_kinds)
    title = f"{made.plan.graph.name} on {len(made.plan.devices)} x {profile.name}"
    how = f"communication inside stages by {methods.intra}, between stages by {methods.inter}"
    return Simulated(
        title,
        played.timeline,
        played.level_names,
        peaks_of(compiled),
        profile.memory_bytes,
        live_of(compiled, played.timeline),
        update_secs,
        (*profile.assumptions, how, *ASSUMED, *((HALVES,) if has_halves else ())),
    )


@paused_collector()
def step_secs(
    compiled: Compiled,
    profile: DeviceProfile,
    *,
    communication: str = "rvd",
    intra: str | None = None,
    inter: str | None = None,
    wires: Wires | None = None,
) -> float:
    """Seconds of a step, as ``simulate(...).secs``, without its memory, which takes as long.

    Args:
        compiled, profile, communication, intra, inter: as in ``simulate``.
        wires: known prices of communication on the topology of the program; none if None.

    Raises:
        PlanError: as in ``simulate``.
    """
    methods = Methods(intra or communication, inter or communication)
    played = _play(compiled, profile, None, methods, wires)
    return played.timeline.makespan / TICKS_PER_SEC


@dataclass(frozen=True)
class _Played:
    """What happened in a step.

    Attributes:
        timeline: all runs and their times.
        level_names: names of the topology's levels.
        update_secs: seconds of one update of the weights on every device.
    """

    timeline: StepTimeline
    level_names: tuple[str, ...]
    update_secs: Mapping[Device, float]


def _play(
    compiled: Compiled,
    profile: DeviceProfile,
    topology: rv.Topology | None,
    methods: Methods,
    wires: Wires | None = None,
) -> _Played:
    """The events of a step in time; arguments and errors as in ``simulate`` and ``step_secs``."""
    for method in (methods.intra, methods.inter):
        if method not in METHODS:
            raise PlanError(
                f"communication {method!r} is not known; there are {', '.join(METHODS)}."
            )
    made = compiled.materialized
    devices = made.plan.devices
    wires = wires or Wires(topology_for(topology or made.topology, devices))
    times = OpTimes(profile)
    work = Work(made, times, wires, methods, compiled.master_dtype)
    stored = StoredMemory(made, compiled.master_dtype).by_device
    update_secs = optimizer_secs(stored, times, STATES[compiled.optimizer], devices)
    with tqdm(total=len(made.events), desc="simulate", delay=2, leave=False, disable=None) as bar:
        stepper = Stepper(
            made,
            work,
            update_secs,
            carry_secs=profile.move_secs + profile.carry_secs,
            wake_secs=profile.wake_secs,
            tick=bar.update,
        )
        timeline = stepper.run()
    if 0 < profile.num_cores < len(devices):
        timeline = on_cores(timeline, profile.num_cores)
    return _Played(timeline, wires.level_names, update_secs)


def optimizer_secs(
    stored: Mapping[Device, Stored], times: OpTimes, num_states: int, devices: Iterable[Device]
) -> Mapping[Device, float]:
    """Seconds of the optimizer on every device, given the parameters that it stores."""
    found = {}
    for device in devices:
        mine = stored.get(device) or Stored()
        found[device] = times.update_secs(num_states, mine.trained_bytes, mine.hosted_trained_bytes)
    return found
