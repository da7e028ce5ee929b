"""Simulate: time and memory of a program's step on any topology, without running it."""

from __future__ import annotations

from collections.abc import Mapping

from tqdm import tqdm

import rvdcomm as rv
from rvdcomm.collector import paused_collector
from superscaler_core.checks import one_of
from superscaler_core.compiled import Compiled
from superscaler_core.cost.comm_cost import METHODS, CommCosts, comm_costs_on, topology_for
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.cost.presets import profile_of
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.levels import levels_of
from superscaler_core.memory import STATES
from superscaler_core.memory.stored import StoredBytes, StoredMemory
from superscaler_core.plan import Device
from superscaler_core.schedules import ActionKind
from superscaler_core.simulator.cores import on_cores
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
    topology: rv.Topology | rv.Network | None = None,
    *,
    communication: str = "rvd",
    intra: str | None = None,
    inter: str | None = None,
    comm_costs: CommCosts | None = None,
) -> Simulated:
    """Simulate a training step: time, bubble, communication and memory.

    The memory takes as long to compute as the time, so it is computed when it is first read.

    Args:
        compiled: the program.
        profile: profile of every device, or a preset's name, one of ``simulator.PROFILES``.
        topology: hosts and links, or a network, by the levels that resemble it; the topology that
            the program was compiled for if None.
        communication: "rvd": by rvdcomm's plans; "ring": by plans that know no hosts, whose
            collectives go around a flat ring of their ranks; or "p2p": every reader pulls what it
            needs from its writers, with one message each.
        intra: overrides ``communication`` inside stages, including weights and gradients.
        inter: overrides ``communication`` between stages.
        comm_costs: known prices of communication on the topology; shared ones (``comm_costs_on``)
            if None.

    Raises:
        PlanError: there is no such profile or method, or the topology lacks a device.
    """
    methods = Methods(intra or communication, inter or communication)
    for method in (methods.intra, methods.inter):
        one_of("communication", method, METHODS)
    if isinstance(profile, str):
        profile = profile_of(profile)
    made = compiled.materialized
    comm_costs = comm_costs or comm_costs_on(
        topology_for(levels_of(topology) or made.topology, made.plan.devices), profile.measured
    )
    # Profiles are compared by identity, so the entry keeps its profile alive.
    where = comm_costs.topology, comm_costs.collectives
    key = id(profile), where, methods, compiled.precision, compiled.optimizer
    _, timeline, update_secs = made.known.of(
        key, lambda: (profile, *_timed(compiled, profile, comm_costs, methods))
    )
    if made.is_asynchronous and made.plan.schedule is not None:
        num_updates = made.plan.num_microbatches // made.plan.schedule.microbatches_per_update
        update_secs = {device: secs * num_updates for device, secs in update_secs.items()}
    has_halves = any(ActionKind.INPUTS in kinds for kinds in made.stage_kinds)
    how = f"communication inside stages by {methods.intra}, between stages by {methods.inter}"
    return Simulated(
        f"{made.plan.graph.name} on {len(made.plan.devices)} x {profile.name}",
        timeline,
        comm_costs.level_names,
        compiled,
        profile,
        update_secs,
        (*profile.assumptions, how, *ASSUMED, *((HALVES,) if has_halves else ())),
    )


def _timed(
    compiled: Compiled, profile: DeviceProfile, comm_costs: CommCosts, methods: Methods
) -> tuple[StepTimeline, Mapping[Device, float]]:
    """The events of a step in time, and the time of each device's optimizer."""
    made, times = compiled.materialized, OpTimes(profile)
    stored = StoredMemory(made, compiled.precision).by_device
    own = {device: stored.get(device) or StoredBytes() for device in made.plan.devices}
    num_states = STATES[compiled.optimizer]
    update_secs = {
        device: times.update_secs(num_states, mine.trained_bytes, mine.hosted_trained_bytes)
        for device, mine in own.items()
    }
    work = Work(made, times, comm_costs, methods, compiled.precision)
    with tqdm(total=len(made.events), desc="simulate", delay=2, leave=False, disable=None) as bar:
        timeline = Stepper(made, work, update_secs, tick=bar.update).run()
    if 0 < profile.num_cores < len(made.plan.devices):
        timeline = on_cores(timeline, profile.num_cores)
    return timeline, update_secs
