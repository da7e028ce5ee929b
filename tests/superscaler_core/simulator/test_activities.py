"""Activities: what devices do and what goes on meanwhile are apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.plan import Overlap
from superscaler_core.simulator import Simulated, simulate
from superscaler_core.simulator.activities import COLOURS, KINDS, activity, hidden
from superscaler_core.simulator.timeline import Outside


def simulated(name: str, **options: Any) -> Simulated:
    with torch.device("meta"):
        model = models.build("gpt", layers=4, sequence=16)
    inputs = models.example_inputs("gpt", 4, layers=4, sequence=16)
    plan = ss.Plan(ss.capture(model, inputs), range(2))
    plans.fill(plan, plans.PLANS[name], options)
    if name == "zero3":
        plan.overlap = Overlap(1, reductions=True)
    return simulate(ss.compile(plan), "v100")


CASES = [simulated("zero3"), simulated("one_f_one_b", microbatches=4)]


@pytest.mark.parametrize("found", CASES, ids=("zero3", "one_f_one_b"))
def test_hidden_communication_is_never_waited_for(found: Simulated) -> None:
    waited = [(d, start, end) for d, start, end in found.timeline.waiting]
    for ran in found.timeline.runs:
        for work_event, start, end in ran.inside.spans:
            if work_event.comm is not None:
                waited += [(d, ran.start + start, ran.start + end) for d in work_event.devices]
    intervals = hidden(found.timeline)
    assert waited
    assert all(intervals.values())
    assert [
        each
        for each in waited
        for start, end in intervals[each[0]]
        if max(start, each[1]) < min(end, each[2])
    ] == []


@pytest.mark.parametrize("found", CASES, ids=("zero3", "one_f_one_b"))
def test_waits_for_sends_add_up_to_those_of_the_account(found: Simulated) -> None:
    timeline = found.timeline
    for device in timeline.devices:
        ticks = sum(end - start for each, start, end in timeline.waiting if each == device)
        assert ticks == sum(t for (each, _), t in timeline.waits.items() if each == device)


@pytest.mark.parametrize("found", CASES, ids=("zero3", "one_f_one_b"))
def test_every_activity_has_a_colour(found: Simulated) -> None:
    names = {
        activity(ran.event, work_event)
        for ran in found.timeline.runs
        for work_event, _, _ in ran.inside.spans
    }
    assert {"forward", "backward", "optimizer"} <= names <= COLOURS.keys()
    assert {*KINDS.values()} <= COLOURS.keys()
    assert KINDS[Outside("begin").kind] == "weights"
