"""Workers: checks that stages are on the devices of their schedule's workers."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.errors import PlanError
from superscaler_core.plan.placement import Placement
from superscaler_core.plan.plan import Plan
from superscaler_core.schedules import Schedule


def check_placement(plan: Plan) -> None:
    """Check that every stage is on its workers' devices, and that stages of a worker share devices.

    A worker is one device or one group of devices, and its row orders their work. If a stage were
    elsewhere, the row would order work on different devices: the result would be correct, but
    slower than the schedule says. A stage may leave some devices of its worker idle.

    If different workers run different microbatches of a stage, the plan assigns the stage to the
    devices of microbatch 0, and the placement gives the devices for the other microbatches.

    Raises:
        PlanError: a stage is not on the devices of its workers; without a placement, two stages of
            one worker are on different devices, or workers split the microbatches of a stage; or
            these workers have different numbers of devices.
    """
    schedule = plan.schedule
    if schedule is None:
        return
    devices = [
        frozenset(device for op in stage.ops for device in plan.op_split(op).devices)
        for stage in plan.stages
    ]
    if plan.placement is None:
        _check_one_route(schedule)
        _check_shared(schedule, devices)
    else:
        _check_stages(schedule, plan.placement, devices)


def _check_one_route(schedule: Schedule) -> None:
    for first, other in zip(*schedule.routes[:2], strict=True) if schedule.routes[1:] else ():
        if first != other:
            raise PlanError(
                f"schedule {schedule.name} deals the microbatches of a stage out among workers "
                f"{list(first)} and {list(other)}: say which devices these are, by "
                "op_order(schedule, Placement(...))."
            )


def _check_stages(
    schedule: Schedule, placement: Placement, devices: Sequence[frozenset[int]]
) -> None:
    for stage, found in enumerate(devices):
        expected = placement.devices_of(schedule, stage, 0)
        if not found <= expected:
            which = f"stage {stage}" + " of microbatch 0" * (len(schedule.routes) > 1)
            raise PlanError(
                f"schedule {schedule.name} has {which} on workers "
                f"{list(schedule.workers_of(stage, 0))}, which are devices {sorted(expected)} by "
                f"placement {placement}, but the plan has it on devices {sorted(found)}; assign it "
                "to devices of its workers."
            )
        for route in range(len(schedule.routes)):
            placement.standing_in(schedule, stage, route)


def _check_shared(schedule: Schedule, devices: Sequence[frozenset[int]]) -> None:
    for worker in range(schedule.num_workers):
        # A stage with several workers is on the devices of all of them.
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
