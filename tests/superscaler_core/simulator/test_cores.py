"""Laws of steps of devices that share cores: closed forms where communication is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.cost.wire import Wire
from superscaler_core.schedules import gpipe, one_f_one_b
from superscaler_core.simulator import PROFILES, Resimulator, Simulated, simulate
from superscaler_core.simulator.ports import Ports
from superscaler_core.simulator.stage_run import UnderWay, run_acts
from superscaler_core.simulator.work import Act
from tests.superscaler_core.simulated_chains import free, given, pipelined
from tests.superscaler_core.training import Case

F, B = 1e-3, 2e-3


def pipeline(d: int, n: int, num_cores: int) -> Simulated:
    """A step of a pipeline of equal stages."""
    compiled = pipelined(d, d, one_f_one_b(d, n), free(d))
    return simulate(compiled, replace(given(compiled.plan.graph, F, B), num_cores=num_cores))


@pytest.mark.parametrize(("d", "n"), [(2, 4), (4, 2), (4, 8), (8, 8)])
def test_one_core_has_all_the_work(d: int, n: int) -> None:
    assert pipeline(d, n, 1).secs == pytest.approx(d * n * (F + B))


@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_cores_share_the_work_and_no_core_waits_longer_than_its_device(num_cores: int) -> None:
    alone, shared = pipeline(4, 8, 0).secs, pipeline(4, 8, num_cores).secs
    assert max(alone, 4 * 8 * (F + B) / num_cores) <= shared <= alone * 4 / num_cores


def test_a_pipeline_of_few_microbatches_loses_nothing_where_its_bubble_is_as_many_devices() -> None:
    """Of 4 stages with 2 microbatches at most 2 work at one time."""
    compiled = pipelined(4, 4, gpipe(4, 2), free(4))
    profile = given(compiled.plan.graph, F, B)
    found = [simulate(compiled, replace(profile, num_cores=num)) for num in (0, 2, 4)]
    assert found[1].secs == found[0].secs == found[2].secs
    assert [ran.inside.ends for ran in found[1].timeline.runs] == [
        ran.inside.ends for ran in found[0].timeline.runs
    ]


def test_devices_that_always_work_together_take_as_often_as_long() -> None:
    compiled = Case("data_parallel", 4, model="mlp").compiled()
    profile = PROFILES["a100"]
    alone, shared = (simulate(compiled, replace(profile, num_cores=num)) for num in (0, 2))
    assert shared.secs == pytest.approx(2 * alone.secs)
    assert shared.compute_secs[0] == pytest.approx(2 * alone.compute_secs[0])


def test_the_resimulator_says_that_it_knows_no_cores() -> None:
    compiled = Case("data_parallel", 4, model="mlp").compiled()
    with pytest.raises(ss.PlanError, match="every device its core"):
        Resimulator(compiled, replace(PROFILES["a100"], num_cores=2))


@pytest.mark.parametrize("num_cores", [0, 1, 1.5])
def test_who_waits_for_a_stage_goes_on_later(num_cores: float) -> None:
    """All stages but one wait, forward and backward; at the end all share the loss."""
    d, secs = 4, 1e-4
    compiled = pipelined(d, d, one_f_one_b(d, 1), free(d))
    profile = replace(given(compiled.plan.graph, F, B), num_cores=num_cores)
    bare, more = (simulate(compiled, replace(profile, wake_secs=each)) for each in (0.0, secs))
    assert bare.secs == pytest.approx(d * (F + B))
    assert more.secs - bare.secs == pytest.approx((2 * (d - 1) + 1) * secs)
    assert more.busy_secs == bare.busy_secs


@pytest.mark.parametrize(("wake", "late"), [(0, 0), (8, 8), (100, 40)])
def test_who_waits_inside_a_stage_goes_on_later(wake: int, late: int) -> None:
    """But never later than by as long as it has waited."""
    move = Wire((0, 1), 5, (), (0,), 0)
    acts = [Act("fast", (0,), 10), Act("slow", (1,), 50), Act("move", (0, 1), 5, move)]
    run = run_acts(acts, (0, 1), (0, 0), Ports(), 0, UnderWay(), wake)
    assert run.ends == (55 + late, 55)


def test_a_device_that_is_busy_does_not_wake_up() -> None:
    """Devices of one core are never all asleep: waking up happens beside the work of others."""
    compiled = pipelined(2, 2, one_f_one_b(2, 64), free(2))
    profile = replace(given(compiled.plan.graph, F, B), num_cores=1)
    bare, more = (simulate(compiled, replace(profile, wake_secs=each)).secs for each in (0.0, 1e-4))
    assert more - bare <= 8 * 1e-4


def test_a_part_of_a_core_is_as_slow() -> None:
    compiled = Case("data_parallel", 4, model="mlp").compiled()
    profile = PROFILES["a100"]
    alone, shared = (simulate(compiled, replace(profile, num_cores=num)) for num in (0, 1.6))
    assert shared.secs == pytest.approx(2.5 * alone.secs)


def test_starting_a_carry_is_work_of_a_core() -> None:
    """On one core every carry of two devices adds its overhead of both."""
    d, n, secs = 2, 4, 1e-4
    compiled = pipelined(d, d, one_f_one_b(d, n), free(d))
    profile = replace(given(compiled.plan.graph, F, B), num_cores=1)
    bare, more = (
        simulate(compiled, replace(profile, carry_secs=each)).secs for each in (0.0, secs)
    )
    assert more - bare == pytest.approx(2 * 2 * n * secs)
