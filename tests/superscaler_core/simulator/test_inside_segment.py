"""Inside a segment: an estimate that keeps to the measured ends and the measured peak."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.cost import OpTimes
from superscaler_core.materialize import Segment
from superscaler_core.program import Verb
from superscaler_core.simulator import PROFILES
from superscaler_core.simulator.inside_segment import InsideSegments

INSIDE = InsideSegments(OpTimes(PROFILES["v100"]))


def segments_of(keep: ss.Keep) -> list[Segment]:
    with torch.device("meta"):
        model = models.build("gpt", layers=2, sequence=16)
    plan = ss.Plan(
        ss.capture(model, models.example_inputs("gpt", 2, layers=2, sequence=16)), range(1)
    )
    plans.fill(plan, plans.PLANS["data_parallel"], {"keep": keep})
    steps = ss.compile(plan).materialized.stages[0].steps[0]
    return [step for step in steps if isinstance(step, Segment)]


SEGMENTS = [*segments_of(ss.Keep.EVERYTHING), *segments_of(ss.Keep.SEGMENT_INPUTS)]
RISING, FALLING = (0, 9000, 5000), (5000, 9000, 100)
SIZES = [(Verb.FORWARD, RISING), (Verb.BACKWARD, FALLING), (Verb.BACKWARD_INPUTS, FALLING)]


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda each: each.name)
@pytest.mark.parametrize(("verb", "sizes"), SIZES)
def test_levels_begin_and_end_at_the_measured_memory_and_reach_the_peak(
    segment: Segment, verb: Verb, sizes: tuple[int, int, int]
) -> None:
    before, most, after = sizes
    levels = INSIDE.levels(segment, verb, *sizes)
    assert levels[-1] == (1.0, after)
    assert max(size for _, size in levels) == most
    assert min(size for _, size in levels) == min(before, after)
    assert all(0.0 <= a[0] <= b[0] <= 1.0 for a, b in pairwise(levels))


def test_a_forward_that_keeps_everything_rises_op_by_op() -> None:
    segment = max(segments_of(ss.Keep.EVERYTHING), key=lambda each: len(each.parts))
    levels = INSIDE.levels(segment, Verb.FORWARD, 0, 10**9, 10**7)
    sizes = [size for _, size in levels if size != 10**9]
    assert sizes == sorted(sizes)
    assert len({*sizes}) > 5
