"""Stages on several workers, for different microbatches: every route is a copy of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Decisions, Keep
from superscaler_core.program.routes import by_routes
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.verb import Verb
from superscaler_core.schedules import Action
from tests.superscaler_core.schedule_rows import round_robin
from tests.superscaler_core.training import Case, RoundRobin, errors_on_threads

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
    read = Decisions.parse(str(decisions))
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


def test_edges_connect_stages_of_the_same_route() -> None:
    made = CHIMERA.compiled().materialized
    ends = {
        (edge.src_stage, edge.dst_stage): (tuple(edge.src.shards), tuple(edge.dst.shards))
        for edge in made.edges.all
        if edge.crosses
    }
    down = {(s, s + 1): ((s,), (s + 1,)) for s in range(3)}
    up = {(4 + s, 5 + s): ((3 - s,), (2 - s,)) for s in range(3)}
    assert ends == down | up


def test_gradients_of_both_routes_are_summed_once_per_step() -> None:
    """A stage is on devices (0, 1) and (2, 3), and each of two devices has half of a matrix."""
    made = TWO_WAYS.compiled().materialized
    (use,) = (u for u in made.weights.uses if u.tensor.name == "layers.0.mlp.up.weight")
    (sub_transfer,) = use.reduce
    assert str(sub_transfer.src.rvd) == "R(1)V(2)D(2,1)"
    assert str(sub_transfer.dst.rvd) == "R(2)V(1)D(2,1)"
    assert [sub_transfer.src.cell(d).box == sub_transfer.src.cell(d + 2).box for d in (0, 1)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("zero1", [False, True])
def test_devices_hold_the_weights_of_two_stages(zero1: bool) -> None:
    """Twice those of 1F1B. With ZeRO 1 the optimizer has as much as in 1F1B."""
    options = {"microbatches": 4}
    straight = Case("one_f_one_b", 4, options, sizes=DEEP).compiled()
    both = Case("chimera", 4, {**options, "zero1": zero1}, sizes=DEEP).compiled()
    once, twice = (
        [StoredMemory(one.materialized).trained_bytes(d) for d in range(4)]
        for one in (straight, both)
    )
    assert sum(twice) == sum(once) * (1 if zero1 else 2)
    assert twice == ([a + b for a, b in zip(once, once[::-1], strict=True)] if not zero1 else twice)
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
    assert max(errors_on_threads(case, tmp_path)) < 1e-12


SAVINGS = ("recompute", "swap", "rerun", "gather", "host", "reduce", "gather and rerun", "order")


def saving(plan: ss.Plan, what: str) -> None:
    """Add a decision about the blocks of the first route."""
    blocks = plan.blocks.all
    if "gather" in what:
        plan.unshard(*blocks)
    if "rerun" in what:
        plan.keep(Keep.BLOCK_INPUTS)
    match what:
        case "recompute":
            plan.keep(Keep.SEGMENT_INPUTS)
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
    plan = replace(TWO_WAYS, options={**TWO_WAYS.options, "zero1": True}).planned()
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

    class Planned(Case):
        def planned(self) -> ss.Plan:
            return plan

    case = Planned(TWO_WAYS.plan, 4, TWO_WAYS.options)
    assert max(errors_on_threads(case, tmp_path)) < 1e-12


# --- the text -----------------------------------------------------------------------------------


def test_step_program_text_states_the_number_of_routes() -> None:
    program = CHIMERA.compiled().step_program
    assert str(program).splitlines()[0] == "step of GPT on 0,1,2,3 of 4 microbatches by 2 routes"
    assert StepProgram.parse(str(program)).num_routes == 2


def test_a_microbatch_on_two_routes_is_refused() -> None:
    program = CHIMERA.compiled().step_program
    astray = [
        replace(e, stage=6) if isinstance(e, Action) and (e.stage, e.microbatch) == (2, 0) else e
        for e in program.events
    ]
    words = r"microbatch 0 is run at stages \[0, 1, 3, 6\], of routes \[0, 1\]: it goes one of 2"
    with pytest.raises(PlanError, match=words):
        replace(program, events=tuple(astray)).check()
    short = [
        e for e in program.events if not isinstance(e, Action) or (e.stage, e.microbatch) != (2, 0)
    ]
    with pytest.raises(PlanError, match="no F of microbatch 0 at stage 2"):
        replace(program, events=tuple(short)).check()


def test_weights_are_updated_after_the_backwards_of_all_routes() -> None:
    program = CHIMERA.compiled().step_program
    (update,) = (i for i in program.end if i.kind is Verb.UPDATE and i.name == "stage0")
    assert update.devices == (0, 3)
    # Both routes add to the gradients that the update takes.
    grads = {value.key for value in update.reads}
    routes = {key[0] // 4 for key, block in program.blocks.items()
              for i in block if any(value.key in grads for value in i.writes)}  # fmt: skip
    assert routes <= {0, 1}
    others = tuple(i for i in program.end if i is not update)
    with pytest.raises(PlanError, match=r"is not there|stands"):
        replace(program, begin=(update, *program.begin), end=others).check()
    with pytest.raises(PlanError, match="nothing takes"):
        replace(program, end=others).check()


def test_round_robin_of_3_and_2_workers_has_6_routes() -> None:
    schedule = round_robin((3, 2), 12)
    assert len(schedule.routes) == 6
    assert [schedule.route_of(m) for m in range(12)] == [*range(6), *range(6)]
