"""Alike devices share the structure of their steps, and each has its own parts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from superscaler_core.materialize.device_steps import DeviceSteps
from superscaler_core.materialize.segments import Segment, Step
from superscaler_core.materialize.sequence import Compute
from superscaler_core.materialize.stage_program import StageProgram
from superscaler_core.plan import Device
from tests.superscaler_core.cases import Case
from tests.superscaler_core.program.few import FEW, compiled

OTHERS = [
    Case("coshard", 2), Case("zero3", 4), Case("branch_parallel", 2, model="evoformer"),
    Case("expert_parallel", 4, model="moe"),
]  # fmt: skip
"""Devices with several parts of an op, windows, and devices that do different things."""


def stages() -> list[StageProgram]:
    cases = (*(compiled(mechanism) for mechanism in FEW), *(case.compiled() for case in OTHERS))
    return [stage for program in cases for stage in program.materialized.stages]


def alone(stage: StageProgram, device: Device) -> tuple[Step, ...]:
    """The steps of a device if there was no other one."""
    given = stage.given
    here = {item: [device] for item, devices in given.taking_part.items() if device in devices}
    items = [
        item for item in given.items
        if (item.device == device if isinstance(item, Compute) else item in here)
    ]  # fmt: skip
    steps = DeviceSteps(replace(given, items=items, taking_part=here))
    return steps[device]


def test_steps_are_those_of_a_device_alone() -> None:
    for stage in stages():
        for device, steps in stage.steps.items():
            for mine, own in zip(steps, alone(stage, device), strict=True):
                if not isinstance(mine, Segment):
                    assert mine == own
                    continue
                assert isinstance(own, Segment)
                for each in fields(Segment):
                    assert getattr(mine, each.name) == getattr(own, each.name)


def test_alike_devices_are_together_and_every_device_is_once() -> None:
    for stage in stages():
        together = [device for alike in stage.steps.alike for device in alike.devices]
        assert sorted(together) == sorted(stage.steps)
        for alike in stage.steps.alike:
            lengths = {len(stage.steps[device]) for device in alike.devices}
            assert lengths == {len(alike.steps)}


@pytest.mark.parametrize(
    ("plan", "together"),
    [("megatron", [(0, 1)]), ("one_f_one_b", [(0,), (1,)]), ("zero3", [(0, 1)])],
)
def test_replicas_and_shards_of_a_stage_are_alike(
    plan: str, together: list[tuple[Device, ...]]
) -> None:
    made = Case(plan, 2).compiled().materialized
    assert [alike.devices for stage in made.stages for alike in stage.steps.alike] == together
