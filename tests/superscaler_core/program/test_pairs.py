"""Pairs: a forward computes while its paired backward communicates; results stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.program.event import OverlappedPair, actions_in
from superscaler_core.schedules import Action
from tests.superscaler_core.cases import Case, check_trains

PAIRS = ss.Overlap(pairs=True)
GPT = {"layers": 4}
OVERLAPPED = [
    Case("dualpipe", 4, {"pp": 2, "tp": 2, "microbatches": 4}, sizes=GPT),
    Case("dualpipe_v", 4, {"pp": 2, "tp": 2, "microbatches": 5}, sizes=GPT, optimizer="adamw"),
    Case("dualpipe_v", 4, {"pp": 2, "tp": 2, "zero": 1}, sizes={**GPT, "tied": True}),
]
OVERLAPPED = [replace(case, overlap=PAIRS) for case in OVERLAPPED]
LARGE = replace(OVERLAPPED[0], num_devices=8, options={"pp": 4, "tp": 2, "microbatches": 8})
OTHERS = ss.Overlap(prefetch=1, reductions=True, moves=True, pairs=True, bucket_bytes=1 << 12)
MORE = [LARGE, replace(OVERLAPPED[1], overlap=OTHERS)]


@pytest.mark.parametrize("case", [*OVERLAPPED, *MORE], ids=str)
def test_plans_with_pairs_train_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    program = case.compiled().step_program
    assert any(isinstance(event, OverlappedPair) for event in program.events)
    program.check()
    assert ss.StepProgram.parse(str(program)) == program
    # Not max(errors), which may ignore a NaN.
    check_trains(case, tmp_path, 1e-10)


# --- the order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OVERLAPPED, ids=str)
def test_woven_events_are_the_pairs_of_the_schedule(case: Case) -> None:
    program, plan = case.compiled().step_program, case.planned()
    assert plan.schedule is not None
    # A copy of a stage on another route has another number.
    found = {
        tuple((a.kind, a.microbatch, a.stage % plan.num_stages) for a in actions_in(event))
        for event in program.events
        if isinstance(event, OverlappedPair)
    }
    wanted = {tuple((a.kind, a.microbatch, a.stage) for a in pair) for pair in plan.schedule.pairs}
    assert found == wanted


@pytest.mark.parametrize("case", OVERLAPPED, ids=str)
def test_one_action_of_a_pair_computes_while_the_other_communicates(case: Case) -> None:
    """Between the start of a move and the wait for it, the other action computes."""
    hidden = 0
    for block in case.compiled().step_program.pairs.values():
        open_: dict[tuple[str, str], int | None] = {}
        for instruction in block:
            if instruction.phase == "start":
                open_[instruction.kind, instruction.name] = instruction.half
            elif instruction.phase == "wait":
                del open_[instruction.kind, instruction.name]
            elif instruction.kind in ("F", "B", "I"):
                hidden += any(half != instruction.half for half in open_.values())
        assert not open_
    assert hidden


def test_pairs_do_not_change_plans_without_communication_inside_stages() -> None:
    plain = Case("dualpipe", 2, {"microbatches": 4}, sizes={"layers": 2})
    overlapped = replace(plain, overlap=PAIRS)
    assert overlapped.compiled().step_program == plain.compiled().step_program


def test_wrongly_woven_program_raises_plan_error() -> None:
    program = OVERLAPPED[0].compiled().step_program
    key, block = next(iter(program.pairs.items()))
    for damaged in (block[1:], block[::-1]):
        with pytest.raises(ss.PlanError, match=r"in the same order|not started|under way"):
            replace(program, pairs={**program.pairs, key: damaged}).check()
    with pytest.raises(ss.PlanError, match="there is no block of such pairs"):
        replace(program, pairs={}).check()
    last = [event for event in program.events if isinstance(event, OverlappedPair)][-1]
    alone = tuple(last.second if event == last else event for event in program.events)
    with pytest.raises(ss.PlanError, match=r"no F|F.* has to be run before"):
        replace(program, events=alone).check()


def test_pairs_together_with_duplex_raise_plan_error() -> None:
    with pytest.raises(ss.PlanError, match="choose duplex or pairs"):
        ss.Overlap(duplex=True, pairs=True)


# --- time and memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", OVERLAPPED[:2], ids=str)
def test_pairs_shorten_a_step_on_slow_links(case: Case) -> None:
    """It takes more than half: computation and communication only hide each other."""
    topology = rv.Topology.single_host(case.num_devices, 2e-5, 1e10)
    plain, overlapped = (
        ss.simulate(one.compiled(), "v100", topology).timeline.makespan
        for one in (replace(case, overlap=ss.Overlap()), case)
    )
    assert plain / 2 < overlapped < 0.95 * plain


def test_simulation_runs_every_action_once_and_pairs_at_one_time() -> None:
    """Every action of the schedule has a run, and both actions of a pair have one time."""
    case = OVERLAPPED[0]
    compiled = case.compiled()
    found = ss.simulate(compiled, "v100")
    runs = {ran.event: ran for ran in found.timeline.runs if isinstance(ran.event, Action)}
    assert set(runs) == {e for e in compiled.materialized.scheduled if isinstance(e, Action)}
    for event in compiled.step_program.events:
        if isinstance(event, OverlappedPair):
            first, second = runs[event.first], runs[event.second]
            assert (first.start, first.inside.ends) == (second.start, second.inside.ends)
            assert {span[0].half for span in first.inside.spans} == {0}
            assert {span[0].half for span in second.inside.spans} == {1}
