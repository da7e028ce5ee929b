"""Step peaks: the largest is the peak of a step, and the peak of a deeper model follows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.memory import StepPeak, StepPeaks
from superscaler_core.schedules import ActionKind

BATCH = 4


@cache
def graph_of(layers: int, **sizes: Any) -> ss.Graph:
    with torch.device("meta"):
        model = models.build("gpt", layers=layers, **sizes)
    return ss.capture(model, models.example_inputs("gpt", BATCH, layers=layers, **sizes))


def compiled(layers: int, name: str, options: dict[str, Any], **sizes: Any) -> ss.Compiled:
    plan = ss.Plan(graph_of(layers, **sizes), range(2))
    plans.fill(plan, plans.PLANS[name], options)
    return ss.compile(plan)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("megatron", {}),
    ("zero3", {}),
    ("hybrid", {"pp": 2, "microbatches": 4}),
    ("hybrid", {"pp": 2, "microbatches": 4, "keep": ss.Keep.BLOCK_INPUTS}),
    ("hybrid", {"tp": 2, "coshard": 2}),
]


@pytest.mark.parametrize(("name", "options"), PLANS)
def test_largest_step_peak_equals_the_memory_of_the_device(
    name: str, options: dict[str, Any]
) -> None:
    made = compiled(4, name, options, sequence=16)
    peaks = {device: own.most_bytes for device, own in made.step_peaks.items()}
    assert peaks == {device: own.total_bytes for device, own in made.memory.items()}


@pytest.mark.parametrize(("name", "options"), PLANS)
def test_peak_of_a_deep_model_is_extrapolated_from_two_short_ones(
    name: str, options: dict[str, Any]
) -> None:
    # With this large vocabulary, the ops after the blocks need most memory in a short model. In a
    # deep model, the blocks need most.
    sizes = {"sequence": 64, "vocabulary": 2048}
    first, second, deep = (compiled(n, name, options, **sizes) for n in (6, 8, 32))
    for device, own in first.step_peaks.items():
        grown = own.grown(second.step_peaks[device], (32 - 6) // 2)
        assert grown == pytest.approx(deep.memory[device].total_bytes, rel=0.002)


RUN = ActionKind.FORWARD, 0, False


def peaks(*sizes: tuple[str, int], between: int = 0) -> StepPeaks:
    return StepPeaks({RUN: [StepPeak(form, size) for form, size in sizes]}, between)


def test_fastest_growing_step_determines_the_peak_of_a_deep_model() -> None:
    first = peaks(("words", 9), ("block", 2), ("block", 3), ("head", 5))
    second = peaks(("words", 9), ("block", 2), ("block", 3), ("block", 4), ("head", 6))
    # The step of words does not grow, and the last step grows by 1 for every block.
    assert first.grown(second, 2) == 9
    assert first.grown(second, 10) == 5 + 10


def test_shrinking_step_peaks_are_not_extrapolated() -> None:
    first, second = peaks(("block", 9), between=1), peaks(("block", 7), between=3)
    assert first.grown(second, 4) == 1 + 4 * 2
    assert first.grown(peaks(("block", 7)), 4) == 7
