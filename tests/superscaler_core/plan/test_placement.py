"""Laws of placements: a value with a text, which a schedule's stages keep to."""

from __future__ import annotations

from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.plan import Decisions, Placement, check_placement
from superscaler_core.plans import PLANS
from superscaler_core.schedules import Action, Schedule, interleaved, one_f_one_b
from tests.superscaler_core.training import MODEL_OF, Case


def plan_of(device_of: tuple[int, ...], placement: Placement | None = None) -> ss.Plan:
    """Four stages of an interleaved schedule of two workers, each stage on a device."""
    graph = Case("one_f_one_b", 2, sizes={"layers": 4}).compiled().plan.graph
    plan = ss.Plan(graph, range(2))
    size = len(graph.ops) // 4
    for stage in plan.pipeline([size, 2 * size, 3 * size]):
        for op in stage.ops:
            plan.op_assign(op, device_of[stage.index])
    plan.op_order(interleaved(2, 4, 2), placement)
    return plan


# --- the value ----------------------------------------------------------------------------------

PLACEMENTS = [
    Placement(((0,),)),
    Placement(((3,), (0,))),
    Placement(((0, 1), (2,), (5, 4))),
    Placement.even(range(8), 2),
    Placement.even((7, 3, 1), 3),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_text_is_read_back(placement: Placement) -> None:
    read = Placement.parse(str(placement))
    assert read == placement
    assert hash(read) == hash(placement)


def test_placements_are_equal_if_workers_have_the_same_devices() -> None:
    assert Placement(((1, 0), (2,))) == Placement(((0, 1), (2,)))
    assert len(set(PLACEMENTS) | {Placement(((1, 0), (2,), (4, 5)))}) == len(PLACEMENTS)
    assert Placement(((0,), (1,))) != Placement(((1,), (0,)))


def test_even_deals_out_devices_next_to_each_other() -> None:
    assert Placement.even((4, 5, 6, 7), 2).workers == ((4, 5), (6, 7))


@pytest.mark.parametrize("text", ["", "0", "1:0", "0:0 2:1", "0:a", "0:0,", "0:0 1:", "0;0"])
def test_texts_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"is no placement: it is WORKER:DEVICE,DEVICE"):
        Placement.parse(text)


@pytest.mark.parametrize("workers", [(), ((),), ((0,), ()), ((0, 1), (1,))])
def test_a_device_is_of_one_worker_and_every_worker_has_one(
    workers: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(PlanError, match="every device is of one worker"):
        Placement(workers)


@pytest.mark.parametrize("num", [0, 3])
def test_workers_divide_the_devices(num: int) -> None:
    with pytest.raises(PlanError, match=f"placement of 4 devices on {num} workers"):
        Placement.even(range(4), num)


def test_microbatches_of_a_stage_may_be_on_workers_of_their_own() -> None:
    placement = Placement.even(range(4), 2)
    assert placement.devices_of(COPIES, 0) == {0, 1, 2, 3}
    assert [placement.devices_of(COPIES, 0, m) for m in (0, 1)] == [{0, 1}, {2, 3}]


COPIES = Schedule(
    "copies", 1, 2,
    tuple((Action("F", 0, m), Action("B", 0, m)) for m in (0, 1)),
)  # fmt: skip
"""One stage on two workers, each with a microbatch."""


# --- in a plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["gpipe", "one_f_one_b", "interleaved", "interlaced", "hybrid", "coshard", "dap_pipeline",
     "nf1b"],
)  # fmt: skip
def test_plans_with_stages_say_which_devices_are_their_workers(name: str) -> None:
    sizes = {"layers": 4}
    plan = Case(name, 2, model=MODEL_OF.get(name, "mlp"), sizes=sizes).compiled().plan
    assert plan.schedule is not None
    assert plan.placement is not None
    assert len(plan.placement.workers) == plan.schedule.num_workers
    decisions = plan.decisions
    assert Decisions.parse(str(decisions)) == decisions
    assert f"\nplace {plan.placement}\n" in f"{decisions}\n"
    assert plan.copy().placement == plan.placement
    assert replace(decisions, placement=None) != decisions


def test_stages_of_a_worker_are_on_one_device() -> None:
    assert ss.compile(plan_of((0, 1, 0, 1))).files


def test_a_worker_on_two_devices_is_refused() -> None:
    words = r"stages 0 and 2 on worker 0, .* stage 0 on devices \[0\] and stage 2 on \[1\]"
    with pytest.raises(PlanError, match=words):
        ss.compile(plan_of((0, 0, 1, 1)))


def test_stages_are_on_the_devices_that_the_placement_says() -> None:
    assert ss.compile(plan_of((1, 0, 1, 0), Placement(((1,), (0,))))).files
    words = r"stage 0 on workers \[0\], which are devices \[0\] by placement 0:0 1:1, .* \[1\]"
    with pytest.raises(PlanError, match=words):
        ss.compile(plan_of((1, 0, 1, 0), Placement(((0,), (1,)))))


def test_copies_of_a_stage_are_refused_in_one_line() -> None:
    graph = Case("data_parallel", 2).compiled().plan.graph
    plan = ss.Plan(graph, range(2))
    PLANS["data_parallel"](plan)
    plan.op_order(COPIES, Placement.even(range(2), 2))
    words = (
        r"microbatch 0 of stage 0 on workers \[0\] and microbatch 1 on workers \[1\]: copies of a "
        "stage on several workers cannot be run yet"
    )
    with pytest.raises(PlanError, match=words) as raised:
        check_placement(plan)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(((0,),)), "1f1b of 2 workers: placement 0:0 is of 1"),
        (Placement(((0,), (9,))), r"placement 0:0 1:9 has devices \[9\]; the plan has \[0, 1\]"),
    ],
)
def test_a_placement_of_other_workers_or_devices_is_refused(
    placement: Placement, words: str
) -> None:
    plan = Case("one_f_one_b", 2).compiled().plan
    with pytest.raises(PlanError, match=words):
        plan.op_order(one_f_one_b(2, 3), placement)


def test_a_placement_without_a_schedule_is_refused() -> None:
    plan = Case("data_parallel", 2).compiled().plan
    text = f"{plan.decisions}\nplace 0:0,1"
    with pytest.raises(PlanError, match="place 0:0,1: there is no schedule with workers"):
        ss.Plan(plan.graph, plan.devices).decide(Decisions.parse(text))
