"""Laws of devices that share cores: closed forms if communication is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superscaler_core.cost import CommCost
from superscaler_core.schedules import gpipe, one_f_one_b
from superscaler_core.simulator import PROFILES, Simulated, simulate
from superscaler_core.simulator.busy_ports import BusyPorts
from superscaler_core.simulator.stage_run import StageRuns, UnderWay
from superscaler_core.simulator.work import WorkEvent
from tests.superscaler_core.cases import Case
from tests.superscaler_core.simulated_chains import free, given, pipelined

F, B = 1e-3, 2e-3


def pipeline(d: int, n: int, num_cores: int) -> Simulated:
    """A step of a pipeline of equal stages."""
    compiled = pipelined(d, d, one_f_one_b(d, n), free(d))
    return simulate(compiled, replace(given(compiled.plan.graph, F, B), num_cores=num_cores))


@pytest.mark.parametrize(("d", "n"), [(2, 4), (4, 2), (4, 8), (8, 8)])
def test_step_on_one_core_takes_the_sum_of_all_work(d: int, n: int) -> None:
    assert pipeline(d, n, 1).secs == pytest.approx(d * n * (F + B))


@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_step_on_shared_cores_is_within_its_lower_and_upper_bound(num_cores: int) -> None:
    alone, shared = pipeline(4, 8, 0).secs, pipeline(4, 8, num_cores).secs
    assert max(alone, 4 * 8 * (F + B) / num_cores) <= shared <= alone * 4 / num_cores


def test_two_cores_suffice_for_four_stages_and_two_microbatches() -> None:
    """With 2 microbatches, at most 2 of the 4 stages work at the same time."""
    compiled = pipelined(4, 4, gpipe(4, 2), free(4))
    profile = given(compiled.plan.graph, F, B)
    found = [simulate(compiled, replace(profile, num_cores=num)) for num in (0, 2, 4)]
    assert found[1].secs == found[0].secs == found[2].secs
    assert [ran.inside.ends for ran in found[1].timeline.runs] == [
        ran.inside.ends for ran in found[0].timeline.runs
    ]


def test_four_data_parallel_devices_on_two_cores_take_twice_as_long() -> None:
    compiled = Case("data_parallel", 4, model="mlp").compiled()
    profile = PROFILES["a100"]
    alone, shared = (simulate(compiled, replace(profile, num_cores=num)) for num in (0, 2))
    assert shared.secs == pytest.approx(2 * alone.secs)
    assert shared.compute_secs[0] == pytest.approx(2 * alone.compute_secs[0])


@pytest.mark.parametrize("num_cores", [0, 1, 1.5])
def test_wait_for_another_stage_adds_the_wake_up_time(num_cores: float) -> None:
    """All stages but one wait, in the forward and in the backward. Then all share the loss."""
    d, secs = 4, 1e-4
    compiled = pipelined(d, d, one_f_one_b(d, 1), free(d))
    profile = replace(given(compiled.plan.graph, F, B), num_cores=num_cores)
    bare, more = (simulate(compiled, replace(profile, wake_secs=each)) for each in (0.0, secs))
    assert bare.secs == pytest.approx(d * (F + B))
    assert more.secs - bare.secs == pytest.approx((2 * (d - 1) + 1) * secs)
    assert more.busy_secs == bare.busy_secs


@pytest.mark.parametrize(("wake", "late"), [(0, 0), (8, 8), (100, 40)])
def test_wait_inside_a_stage_adds_at_most_the_wake_up_time(wake: int, late: int) -> None:
    """The delay is at most as long as the wait."""
    move = CommCost((0, 1), 5, (), (0,), 0)
    work_events = [
        WorkEvent("fast", (0,), 10),
        WorkEvent("slow", (1,), 50),
        WorkEvent("move", (0, 1), 5, move),
    ]
    runs = StageRuns(BusyPorts(), wake_ticks=wake)
    _, run = runs.run(work_events, (0, 1), (0, 0), (0, 0), UnderWay())
    assert run.ends == (55 + late, 55)


def test_wake_up_time_is_hidden_while_the_core_is_busy() -> None:
    """One device of the core wakes up while another one computes."""
    compiled = pipelined(2, 2, one_f_one_b(2, 64), free(2))
    profile = replace(given(compiled.plan.graph, F, B), num_cores=1)
    bare, more = (simulate(compiled, replace(profile, wake_secs=each)).secs for each in (0.0, 1e-4))
    assert more - bare <= 8 * 1e-4


def test_fraction_of_a_core_per_device_slows_the_step_in_proportion() -> None:
    compiled = Case("data_parallel", 4, model="mlp").compiled()
    profile = PROFILES["a100"]
    alone, shared = (simulate(compiled, replace(profile, num_cores=num)) for num in (0, 1.6))
    assert shared.secs == pytest.approx(2.5 * alone.secs)


def test_p2p_overhead_of_both_devices_is_work_of_the_core() -> None:
    """On one core, every P2P send between two devices adds the overhead of both."""
    d, n, secs = 2, 4, 1e-4
    compiled = pipelined(d, d, one_f_one_b(d, n), free(d))
    profile = replace(given(compiled.plan.graph, F, B), num_cores=1)
    bare, more = (simulate(compiled, replace(profile, p2p_secs=each)).secs for each in (0.0, secs))
    assert more - bare == pytest.approx(2 * 2 * n * secs)
