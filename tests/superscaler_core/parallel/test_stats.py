"""Stats: what steps took and used, and what callbacks are told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.parallel.stats import StepStats, summed
from tests.superscaler_core.parallel.threads import on_threads
from tests.superscaler_core.run.test_results import batch, words

PLANS = {
    "data_parallel": {},
    "megatron": {},
    "zero3": {},
    "one_f_one_b": {"microbatches": 2},
}


def named(size: int) -> dict[str, Tensor]:
    tokens, labels = batch(size, 0)
    return {"tokens": tokens, "labels": labels}


def of_ranks(plan: str, work: Any, num_ranks: int = 2, **options: Any) -> list[Any]:
    found = on_threads(words(), named(4), num_ranks, work, plan=plan, options=options)
    return [found[rank] for rank in range(num_ranks)]


ONE = StepStats("step", 3, 2, 0.5, 1.0, 16, 96, 2048, True, 4096, False, 1e9, 2, 1e9)


# --- values ---------------------------------------------------------------------------------------


def test_stats_of_several_calls_are_the_sums_of_what_each_counts() -> None:
    later = replace(ONE, number=4, num_calls=1, wall_secs=3.0, samples=8, peak_bytes=100)
    both = ONE + later
    assert (both.number, both.num_calls, both.samples, both.peak_bytes) == (4, 3, 24, 4096)
    assert both.samples_per_sec == 24 / 4.0
    assert both.tokens_per_sec == 192 / 4.0
    assert both.model_flops_utilisation == 2e9 / 4.0 / (2 * 1e9)


def test_rates_of_no_calls_are_zero() -> None:
    none = summed([], "step")
    assert (none.num_calls, none.samples_per_sec, none.model_flops_utilisation) == (0, 0.0, None)


def test_logged_values_are_per_call_and_leave_out_what_is_not_known() -> None:
    assert ONE.values["secs"] == 0.25
    assert ONE.values["sent_bytes"] == 1024
    assert ONE.values["model_flops_utilisation"] == 0.5
    unknown = replace(ONE, tokens=0, peak_flops_per_sec=None)
    assert {*ONE.values} - {*unknown.values} == {"tokens_per_sec", "model_flops_utilisation"}


# --- of models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_sends_the_bytes_that_its_plans_say(plan: str) -> None:
    def work(parallel: ss.Parallel) -> tuple[StepStats, int]:
        for _ in range(2):
            parallel.step(**named(4))
        return parallel.stats().last, parallel.facts.planned_bytes

    for stats, planned in of_ranks(plan, work, **PLANS[plan]):
        assert stats.sent_is_counted
        assert stats.sent_bytes == planned > 0


@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_count_the_whole_batch_and_the_model_once(plan: str) -> None:
    def work(parallel: ss.Parallel) -> ss.Stats:
        parallel.step(**named(4))
        parallel.evaluate(**named(4))
        parallel.step(**named(4))
        return parallel.stats()

    alone, *_ = of_ranks("data_parallel", work, num_ranks=1)
    for found in of_ranks(plan, work, **PLANS[plan]):
        assert (found.last.number, found.last.num_calls) == (2, 1)
        assert (found.all.number, found.all.num_calls) == (2, 2)
        assert (found.all.samples, found.all.tokens) == (8, 48)
        # Microbatches have another form of the loss's mean, which is few operations.
        assert found.all.model_flops == pytest.approx(alone.all.model_flops, rel=1e-3)
        assert found.all.num_devices == 2
        assert 0 < found.all.secs < found.all.wall_secs
        assert found.last.peak_bytes > 0


def test_a_step_needs_three_times_the_operations_of_a_forward() -> None:
    def work(parallel: ss.Parallel) -> tuple[float, float]:
        parallel.step(**named(4))
        parallel.evaluate(**named(4))
        return parallel.meter.last("step").model_flops, parallel.meter.last("evaluate").model_flops

    ((step, forward),) = of_ranks("data_parallel", work, num_ranks=1)
    # Products of matrices dominate; the first one needs no gradient of its input.
    assert 2.5 < step / forward <= 3.0


def test_recomputation_is_no_operation_of_the_model() -> None:
    def work(parallel: ss.Parallel) -> float:
        parallel.step(**named(4))
        return parallel.stats().last.model_flops

    kept, again = (
        of_ranks("data_parallel", work, keep=keep)
        for keep in (ss.Keep.EVERYTHING, ss.Keep.SEGMENT_INPUTS)
    )
    assert kept == again


def test_stats_begin_anew_after_they_are_taken() -> None:
    def work(parallel: ss.Parallel) -> list[int]:
        found = []
        for reset in (False, True, True):
            parallel.step(**named(4))
            found.append(parallel.stats(reset=reset).all.num_calls)
        return found

    assert of_ranks("data_parallel", work, num_ranks=1) == [[1, 2, 1]]


def test_steps_of_programs_that_are_dropped_stay_in_the_sums() -> None:
    def work(parallel: ss.Parallel) -> tuple[int, int]:
        for size in (4, 3, 3):
            parallel.step(**named(size))
        parallel.meter.settle(())
        parallel.step(**named(4))
        stats = parallel.stats()
        return stats.all.num_calls, stats.all.samples

    assert of_ranks("data_parallel", work, num_ranks=1) == [(4, 14)]


def test_a_peak_gives_the_utilisation_of_all_devices() -> None:
    profile = replace(ss.cost.PROFILES["h100"], flops_per_sec={"float64": 5e9})

    def work(parallel: ss.Parallel) -> list[StepStats]:
        parallel.step(**named(4))
        none = parallel.stats(reset=False).last
        return [
            none,
            *(parallel.stats(peak_flops_per_sec=x, reset=False).last for x in (5e9, profile)),
        ]

    for none, by_number, by_profile in of_ranks("data_parallel", work):
        assert none.model_flops_utilisation is None
        want = none.model_flops / none.wall_secs / (2 * 5e9)
        assert by_number.model_flops_utilisation == pytest.approx(want, rel=1e-12)
        assert by_profile == by_number


def test_odd_peaks_are_refused() -> None:
    other = replace(ss.cost.PROFILES["h100"], flops_per_sec={"float16": 1e15})

    def work(parallel: ss.Parallel) -> None:
        for odd in (0, -1.0, float("nan"), "h100"):
            with pytest.raises(PlanError, match="operations per second of a device, above 0"):
                parallel.stats(peak_flops_per_sec=odd)  # type: ignore[arg-type]
        parallel.step(**named(4))
        with pytest.raises(PlanError, match="has no flops_per_sec of float64"):
            parallel.stats(peak_flops_per_sec=other)

    of_ranks("data_parallel", work, num_ranks=1)


def test_stats_of_all_ranks_have_the_bytes_of_all() -> None:
    def work(parallel: ss.Parallel) -> tuple[StepStats, StepStats]:
        parallel.step(**named(4))
        own = parallel.stats(reset=False).last
        return own, parallel.stats(of_all_ranks=True).last

    (first, both), (second, same) = of_ranks("zero3", work)
    assert both == same
    assert both.sent_bytes == first.sent_bytes + second.sent_bytes
    assert both.secs == max(first.secs, second.secs)
