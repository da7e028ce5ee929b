"""Placements: a value with a text form, and checks of stages against it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.plan import Decisions, Placement, check_placement
from superscaler_core.published.chimera import chimera
from superscaler_core.schedules import Action, Schedule, interleaved, one_f_one_b
from tests.superscaler_core.cases import MODEL_OF, Case


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

PLACEMENTS = [Placement(((0,),)), Placement(((3,), (0,))), Placement(((0, 1), (2,), (5, 4)))]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_placement_round_trips_through_its_text(placement: Placement) -> None:
    read = Placement.parse(str(placement))
    assert read == placement
    assert hash(read) == hash(placement)


def test_even_placement_gives_each_worker_consecutive_devices() -> None:
    assert Placement.even((4, 5, 6, 7), 2).workers == ((4, 5), (6, 7))
    assert Placement(((1, 0), (2,))) == Placement(((0, 1), (2,)))
    assert Placement(((0,), (1,))) != Placement(((1,), (0,)))


@pytest.mark.parametrize("text", ["", "0:0 2:1", "0:a", "0:0,"])
def test_malformed_placement_text_is_rejected(text: str) -> None:
    with pytest.raises(PlanError, match=r"is no placement: it is WORKER:DEVICE,DEVICE"):
        Placement.parse(text)


@pytest.mark.parametrize("workers", [(), ((0,), ()), ((0, 1), (1,))])
def test_placement_with_shared_or_missing_devices_is_rejected(
    workers: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(PlanError, match="every device is of one worker"):
        Placement(workers)


@pytest.mark.parametrize("num", [0, 3])
def test_worker_count_that_does_not_divide_the_devices_is_rejected(num: int) -> None:
    with pytest.raises(PlanError, match=f"placement of 4 devices on {num} workers"):
        Placement.even(range(4), num)


def test_microbatches_of_a_stage_may_run_on_different_workers() -> None:
    placement = Placement.even(range(4), 2)
    assert placement.devices_of(COPIES, 0) == {0, 1, 2, 3}
    assert [placement.devices_of(COPIES, 0, m) for m in (0, 1)] == [{0, 1}, {2, 3}]


COPIES = Schedule(
    "copies", 1, 2,
    tuple((Action("F", 0, m), Action("B", 0, m)) for m in (0, 1)),
)  # fmt: skip
"""One stage on two workers, each with one microbatch."""


# --- in a plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["interlaced", "nf1b", "zero_bubble_v"])
def test_pipeline_plans_record_the_devices_of_their_workers(name: str) -> None:
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


def test_stages_of_one_worker_on_different_devices_are_rejected() -> None:
    assert ss.compile(plan_of((0, 1, 0, 1))).files
    words = r"stages 0 and 2 on worker 0, .* stage 0 on devices \[0\] and stage 2 on \[1\]"
    with pytest.raises(PlanError, match=words):
        ss.compile(plan_of((0, 0, 1, 1)))


def test_stages_have_to_be_on_the_devices_of_the_placement() -> None:
    assert ss.compile(plan_of((1, 0, 1, 0), Placement(((1,), (0,))))).files
    words = r"stage 0 on workers \[0\], which are devices \[0\] by placement 0:0 1:1, .* \[1\]"
    with pytest.raises(PlanError, match=words):
        ss.compile(plan_of((1, 0, 1, 0), Placement(((0,), (1,)))))


# --- stages on several workers ------------------------------------------------------------------

TWO_WAYS = chimera(2, 2)
UNEVEN = Schedule.parse(
    """uneven stages=1 microbatches=2
worker 0: 0F0 0B0
worker 1: 0F1 0B1
worker 2: 0F1 0B1"""
)
"""A stage that is on one worker for the first microbatch, and on two for the second."""


def two_ways(schedule: Schedule, placement: Placement | None, *stages: tuple[int, ...]) -> ss.Plan:
    """A model on four devices, the batch of every stage cut among some of them."""
    graph = Case("data_parallel", 2).compiled().plan.graph
    plan = ss.Plan(graph, range(4))
    cuts = [len(graph.ops) * i // len(stages) for i in range(1, len(stages))]
    for stage, devices in zip(plan.pipeline(cuts), stages, strict=True):
        for op in stage.ops:
            plan.spread(op, devices, [ss.Axis(len(devices), (plan.dims.batch,))])
    plan.op_order(schedule, placement)
    return plan


def test_devices_of_a_route_replace_those_of_the_first_route_in_order() -> None:
    placement = Placement(((4, 1), (2, 3)))
    found = [placement.standing_in(TWO_WAYS, stage, 1) for stage in (0, 1)]
    assert found == [{1: 2, 4: 3}, {2: 1, 3: 4}]
    assert placement.standing_in(TWO_WAYS, 0, 0) == {1: 1, 4: 4}


def test_plan_assigns_a_stage_to_the_devices_of_the_first_microbatch() -> None:
    placement = Placement.even(range(4), 2)
    plan = two_ways(TWO_WAYS, placement, (0, 1), (2, 3))
    check_placement(plan)
    first = plan.graph.ops[0]
    assert [[there[d] for d in (0, 1)] for there in plan.stand_ins(first)] == [[0, 1], [2, 3]]
    words = (
        r"stage 0 of microbatch 0 on workers \[0\], which are devices \[0, 1\] by placement "
        r"0:0,1 1:2,3, but the plan has it on devices \[2, 3\]"
    )
    with pytest.raises(PlanError, match=words):
        check_placement(two_ways(TWO_WAYS, placement, (2, 3), (0, 1)))


def test_schedule_with_several_routes_requires_a_placement() -> None:
    words = r"chimera deals the microbatches of a stage out among workers \[0\] and \[1\]: say"
    with pytest.raises(PlanError, match=words) as raised:
        ss.compile(two_ways(TWO_WAYS, None, (0,), (1,)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("schedule", "placement", "stages", "words"),
    [
        (TWO_WAYS, Placement(((0,), (1, 2))), ((0,), (1, 2)),
         r"stage 0 on workers \[0\], which are devices \[0\] by placement 0:0 1:1,2, and for other "
         r"microbatches on workers \[1\], which are devices \[1, 2\]: .* 2 and 1 devices do not"),
        (UNEVEN, Placement(((0,), (1,), (2,))), ((0,),),
         r"stage 0 on workers \[0\], .* on workers \[1, 2\], which are devices \[1, 2\]"),
    ],
    ids=["devices", "workers"],
)  # fmt: skip
def test_routes_with_different_device_counts_of_a_stage_are_rejected(
    schedule: Schedule, placement: Placement, stages: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        ss.compile(two_ways(schedule, placement, *stages))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("worker 0: 0F0 0B0\nworker 1: 1F0 1B0 1F1 1B1", "no worker runs 0F1"),
        ("worker 0: 0F0 0B0 0F1 0B1 1F0 1B0\nworker 1: 1F0 1B0 1F1 1B1",
         r"stage 1 runs microbatch 0 on workers \[0, 1\] and microbatch 1 on \[1\]"),
    ],
    ids=["none", "two"],
)  # fmt: skip
def test_schedule_with_zero_or_two_workers_for_a_microbatch_is_rejected(
    rows: str, words: str
) -> None:
    said = str(two_ways(TWO_WAYS, Placement.even(range(4), 2), (0, 1), (2, 3)).decisions)
    before, _, after = said.partition("schedule ")
    text = (
        f"{before}schedule own stages=2 microbatches=2\n{rows}\nplace{after.partition('place')[2]}"
    )
    with pytest.raises(PlanError, match=words):
        Decisions.parse(text)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(((0,),)), "1f1b of 2 workers: placement 0:0 is of 1"),
        (Placement(((0,), (9,))), r"placement 0:0 1:9 has devices \[9\]; the plan has \[0, 1\]"),
    ],
)
def test_placement_with_wrong_workers_or_devices_is_rejected(
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
