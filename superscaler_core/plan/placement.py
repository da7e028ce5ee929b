"""Placement: a schedule's workers are devices of the plan."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.plan.plan import Plan


def check_placement(plan: Plan) -> None:
    """Stages that a schedule gives to one worker run on the same devices.

    A worker is one device or one group of devices, and its row says in which order they work. With
    stages elsewhere the rows would order what runs on different devices, and not what shares one:
    right, and slower than the schedule says. A stage may leave some of its worker's devices idle.

    Raises:
        PlanError: two stages of a worker are on other devices; the message names them.
    """
    schedule = plan.schedule
    if schedule is None:
        return
    devices = [
        {d for op in stage.ops for p in plan.parts(op) if (d := plan.device(p)) is not None}
        for stage in plan.stages
    ]
    for worker in range(schedule.num_workers):
        # A stage of several workers is on the devices of all of them.
        own = [s for s in schedule.stages_of(worker) if schedule.workers_of(s) == (worker,)]
        widest = max(own, key=lambda stage: len(devices[stage]), default=None)
        for stage in own:
            assert widest is not None
            if not devices[stage] <= devices[widest]:
                a, b = sorted((stage, widest))
                raise PlanError(
                    f"schedule {schedule.name} has stages {a} and {b} on worker {worker}, which is "
                    f"one device or one group of them, but the plan has stage {a} on devices "
                    f"{sorted(devices[a])} and stage {b} on {sorted(devices[b])}; assign both to "
                    "the same devices."
                )
