"""Stages on several workers, for different microbatches: every route is a copy of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.materialize.routes import by_routes
from superscaler_core.memory import StoredMemory
from superscaler_core.schedules import Action
from tests.superscaler_core.cases import Case, RoundRobin, check_trains

DEEP = {"layers": 4}
TWO_WAYS = Case("chimera", 4, {"pp": 2, "tp": 2, "microbatches": 4})
CHIMERA = Case("chimera", 4, sizes=DEEP)
REPLICATED = RoundRobin(options={"num_microbatches": 3})


@pytest.mark.parametrize("name", ["hybrid", "interleaved", "zero3"])
def test_plan_with_one_route_is_unchanged(name: str) -> None:
    plan = Case(name, 2, sizes=DEEP).planned()
    assert by_routes(plan) is plan


@pytest.mark.parametrize("case", [TWO_WAYS, CHIMERA, REPLICATED], ids=str)
def test_decisions_are_read_back_and_make_the_same_program(case: Case) -> None:
    compiled = case.compiled()
    decisions = compiled.plan.decisions
    read = ss.Decisions.parse(str(decisions))
    assert read == decisions
    again = ss.Plan(compiled.plan.graph, compiled.plan.devices)
    again.decide(read)
    assert ss.compile(again).files == compiled.files


# --- placement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [TWO_WAYS, CHIMERA, REPLICATED], ids=str)
def test_a_microbatch_runs_on_the_workers_of_its_schedule(case: Case) -> None:
    made = case.compiled().materialized
    schedule, placement = made.plan.schedule, made.plan.placement
    assert schedule is not None
    assert placement is not None
    ran = Counter(event for event in made.events if isinstance(event, Action))
    assert len(ran) == len(schedule.places) == ran.total()
    for event in ran:
        home = replace(event, stage=event.stage % schedule.num_stages)
        assert home in schedule.places
        expected = placement.devices_of(schedule, home.stage, event.microbatch)
        assert made.stage_devices[event.stage] == expected


@pytest.mark.parametrize("zero", [0, 1])
def test_devices_hold_the_weights_of_two_stages(zero: int) -> None:
    """Twice those of 1F1B. With ZeRO 1 the optimizer has as much as in 1F1B."""
    options = {"microbatches": 4}
    straight = Case("one_f_one_b", 4, options, sizes=DEEP).compiled()
    both = Case("chimera", 4, {**options, "zero": zero}, sizes=DEEP).compiled()
    once, twice = (
        [StoredMemory(one.materialized).trained_bytes(d) for d in range(4)]
        for one in (straight, both)
    )
    assert sum(twice) == sum(once) * (1 if zero else 2)
    assert twice == ([a + b for a, b in zip(once, once[::-1], strict=True)] if not zero else twice)
    reading = [sum(use.sharding.num_elements.get(d, 0) for use in both.materialized.weights.uses)
               for d in range(4)]  # fmt: skip
    assert [8 * n for n in reading] == [a + b for a, b in zip(once, once[::-1], strict=True)]


def test_stage_on_one_worker_for_two_routes_has_its_weights_once() -> None:
    made = REPLICATED.compiled().materialized
    assert made.plan.num_routes == 2
    reading = [use for use in made.weights.uses if 2 in use.sharding.shards]
    assert reading
    assert {use.number for use in reading} == {0}
    assert all(
        use.is_stored and all(sub_transfer.is_idle for sub_transfer in use.reduce)
        for use in reading
    )


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        REPLICATED,
        RoundRobin(options={"num_microbatches": 4}, model="mlp", sizes=DEEP, optimizer="adamw"),
        RoundRobin(num_devices=4, replicas=(1, 2, 1), options={"num_microbatches": 5}, sizes=DEEP),
        RoundRobin(num_devices=5, replicas=(3, 2), options={"num_microbatches": 6}, model="mlp"),
        RoundRobin(options={"num_microbatches": 2}, sizes={"tied": True, "layers": 2}),
    ],
    ids=str,
)
def test_replicated_stages_train_the_same_weights_as_one_device(
    case: RoundRobin, tmp_path: Path
) -> None:
    check_trains(case, tmp_path)


SAVINGS = ("recompute", "swap", "rerun", "gather", "host", "reduce", "gather and rerun", "order")


def saving(plan: ss.Plan, what: str) -> None:
    """Add a decision about the blocks of the first route."""
    blocks = plan.blocks.all
    if "gather" in what:
        plan.unshard(*blocks)
    if "rerun" in what:
        plan.keep(ss.Keep.BLOCK_INPUTS)
    match what:
        case "recompute":
            plan.keep(ss.Keep.SEGMENT_INPUTS)
        case "swap":
            plan.offload(*blocks)
        case "reduce":
            plan.reduce_grads(*blocks)
        case "host":
            plan.store_on_host()
        case "order":
            (q,) = (op for op in blocks[0] if op.name == "layers.0.attn.q:linear")
            (k,) = (op for op in blocks[0] if op.name == "layers.0.attn.k:linear")
            plan.op_order(k, q)


@pytest.mark.parametrize(
    "what, overlap", [(what, number % 2 > 0) for number, what in enumerate(SAVINGS)]
)
def test_decisions_about_a_stage_apply_to_all_its_workers(
    what: str, overlap: bool, tmp_path: Path
) -> None:
    plan = replace(TWO_WAYS, options={**TWO_WAYS.options, "zero": 1}).planned()
    saving(plan, what)
    if overlap:
        plan.overlap = ss.Overlap(prefetch=1, reductions=True, moves=True, bucket_bytes=1 << 12)
    compiled = ss.compile(plan)
    program = compiled.materialized.step_program
    program.check()
    # Communication of the whole step is left out, because one call may serve several stages.
    by_stage = {
        key: Counter(i.kind for i in block if i.microbatch is None)
        for key, block in program.blocks.items()
    }
    for stage, kind in by_stage:
        assert by_stage[stage, kind] == by_stage[stage % 2, kind]
    check_trains(TWO_WAYS, tmp_path, compiled=compiled)


# --- the text -----------------------------------------------------------------------------------
