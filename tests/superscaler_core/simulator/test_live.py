"""Live: the memory of devices over a simulated step, also inside runs."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.plan import Overlap
from superscaler_core.simulator import Simulated, simulate

OVERLAP = Overlap(1, reductions=True)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("zero3", {}),
    ("zero3", {"overlap": OVERLAP}),
    ("megatron", {}),
    ("one_f_one_b", {"microbatches": 4}),
    ("zero_bubble", {"microbatches": 4}),
    ("chimera", {"microbatches": 4}),
    ("hybrid", {"pp": 2, "microbatches": 4, "keep": ss.Keep.BLOCK_INPUTS}),
]
BOUNDED: list[tuple[str, dict[str, Any]]] = [
    ("dualpipe_v", {"microbatches": 4}),
    ("megatron", {"overlap": Overlap(duplex=True)}),
]


@cache
def simulated(case: int) -> Simulated:
    name, options = [*CASES, *BOUNDED][case]
    with torch.device("meta"):
        model = models.build("gpt", layers=4, sequence=16)
    inputs = models.example_inputs("gpt", 4, layers=4, sequence=16)
    plan = ss.Plan(ss.capture(model, inputs), range(2))
    plans.fill(plan, plans.PLANS[name], {k: v for k, v in options.items() if k != "overlap"})
    plan.overlap = options.get("overlap", plan.overlap)
    return simulate(ss.compile(plan), "v100")


@pytest.mark.parametrize("case", range(len(CASES)))
def test_largest_memory_over_time_is_the_peak_of_the_device(case: int) -> None:
    found = simulated(case)
    assert {d: max(size for _, size in own) for d, own in found.live.items()} == found.peak_bytes


@pytest.mark.parametrize("case", range(len(CASES), len(CASES) + len(BOUNDED)))
def test_largest_memory_of_woven_runs_and_of_halves_is_near_the_bound(case: int) -> None:
    found = simulated(case)
    for device, series in found.live.items():
        most = max(size for _, size in series)
        assert 0.8 * found.peak_bytes[device] <= most <= found.peak_bytes[device]


@pytest.mark.parametrize("case", range(len(CASES) + len(BOUNDED)))
def test_memory_has_ascending_times_within_the_step(case: int) -> None:
    found = simulated(case)
    for series in found.live.values():
        assert series[0][0] == 0.0
        assert all(before[0] <= after[0] for before, after in pairwise(series))
        assert series[-1][0] <= found.secs


@pytest.mark.parametrize("case", range(len(CASES)))
def test_memory_rises_inside_the_first_forward_and_falls_inside_the_last_backward(
    case: int,
) -> None:
    found = simulated(case)
    for device, series in found.live.items():
        ends = {}
        for ran in found.timeline.runs:
            if device in ran.inside.devices and ran.event.stage >= 0:
                times = ran.start / 1e12, (ran.start + max(ran.inside.ends)) / 1e12
                ends.setdefault("first", times)
                ends["last"] = times
        for start, end in ends.values():
            inside = {size for secs, size in series if start < secs < end}
            assert len(inside) > 3
