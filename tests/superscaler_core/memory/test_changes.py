"""Changes: over the events of a step they add up to the memory of the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.memory import MemoryChanges, changes_of
from superscaler_core.schedules import Action

PLANS: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("zero3", {}),
    ("hybrid", {"tp": 2, "microbatches": 4}),
    ("one_f_one_b", {"microbatches": 4}),
    ("zero_bubble", {"microbatches": 4}),
    ("chimera", {"microbatches": 4}),
    ("pipedream", {"microbatches": 4}),
    ("hybrid", {"pp": 2, "microbatches": 4, "keep": ss.Keep.BLOCK_INPUTS}),
]


@cache
def compiled(case: int) -> ss.Compiled:
    name, options = PLANS[case]
    with torch.device("meta"):
        model = models.build("gpt", layers=4, sequence=16)
    inputs = models.example_inputs("gpt", 4, layers=4, sequence=16)
    plan = ss.Plan(ss.capture(model, inputs), range(2))
    plans.fill(plan, plans.PLANS[name], options)
    return ss.compile(plan)


def changes(case: int) -> dict[int, MemoryChanges]:
    return changes_of(compiled(case).materialized)


@pytest.mark.parametrize("case", range(len(PLANS)))
def test_peak_over_all_changes_equals_the_memory_of_the_device(case: int) -> None:
    peaks = {device: own.most_bytes for device, own in changes(case).items()}
    assert peaks == {device: own.total_bytes for device, own in compiled(case).memory.items()}


@pytest.mark.parametrize("case", range(len(PLANS)))
def test_every_event_of_a_device_that_changes_memory_is_there_in_its_order(case: int) -> None:
    for device, own in changes(case).items():
        events = compiled(case).materialized.events_on[device]
        found = [change.event for change in own.changes if not isinstance(change.event, str)]
        assert found == [event for event in events if event in {*found}]
        runs = [event for event in events if isinstance(event, Action)]
        assert [event for event in found if isinstance(event, Action)] == runs


@pytest.mark.parametrize("case", [0, 3])
def test_nothing_but_gradients_is_left_at_the_end(case: int) -> None:
    for device, own in changes(case).items():
        left = sum(change.net_bytes for change in own.changes)
        # Every stored parameter is trained, and its gradient is as large.
        assert left == compiled(case).memory[device].weights_bytes
