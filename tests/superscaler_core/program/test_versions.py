"""Versions of weights: which version a step program may read, and when it may update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.verb import Phase, Verb
from tests.superscaler_core.training import Case

STASHING = """
step of pipedream on 0,1
begin:
stage 0 F:
  F stage0_segment0 on 0 at 0
  F stage0_segment0 on 0 at 1
  F stage0_segment0 on 0 at 2 v1
  F stage0_segment0 on 0 at 3 v2
stage 0 B:
  B stage0_segment0 on 0 at 0
  update stage0 on 0 at 0 v1 keeps 2
  B stage0_segment0 on 0 at 1
  update stage0 on 0 at 1 v2 keeps 2
  B stage0_segment0 on 0 at 2 v1
  update stage0 on 0 at 2 v3 keeps 2
  B stage0_segment0 on 0 at 3 v2
  update stage0 on 0 at 3 v4 keeps 2
stage 1 F:
  F stage1_segment0 on 1 at 0
  F stage1_segment0 on 1 at 1 v1
  F stage1_segment0 on 1 at 2 v2
  F stage1_segment0 on 1 at 3 v3
stage 1 B:
  B stage1_segment0 on 1 at 0
  update stage1 on 1 at 0 v1
  B stage1_segment0 on 1 at 1 v1
  update stage1 on 1 at 1 v2
  B stage1_segment0 on 1 at 2 v2
  update stage1 on 1 at 2 v3
  B stage1_segment0 on 1 at 3 v3
  update stage1 on 1 at 3 v4
end:
order:
  0F0
  carry e0 0
  0F1
  carry e0 1
  1F0
  1B0
  carry-back e0 0
  0B0
  0F2
  carry e0 2
  1F1
  1B1
  carry-back e0 1
  0B1
  0F3
  carry e0 3
  1F2
  1B2
  carry-back e0 2
  0B2
  1F3
  1B3
  carry-back e0 3
  0B3
"""
"""PipeDream's weight stashing on two stages (Narayanan et al., 2019): the first has two versions,
as two of its microbatches are under way at one time; the last has one."""


def test_weight_stashing_is_accepted_and_read_back() -> None:
    program = StepProgram.parse(STASHING)
    program.check()
    assert str(program) == STASHING.strip()


@pytest.mark.parametrize(
    "old, new, words",
    [
        (
            "update stage0 on 0 at 0 v1 keeps 2",
            "update stage0 on 0 at 0 v1",
            "at 1: version 0 of the weights of stage0 is not kept; there is 1.",
        ),
        (
            "B stage0_segment0 on 0 at 1",
            "B stage0_segment0 on 0 at 1 v1",
            "has read version 0 for microbatch 1, and reads version 1 now",
        ),
        (
            "F stage0_segment0 on 0 at 2 v1",
            "F stage0_segment0 on 0 at 2 v2",
            "version 2 of the weights of stage0 is not kept; there is 0, 1.",
        ),
        (
            "update stage0 on 0 at 1 v2 keeps 2",
            "update stage0 on 0 at 1 v3 keeps 2",
            "update stage0 on 0 at 1 v3 keeps 2: the next version of these weights is 2",
        ),
        (
            "  update stage0 on 0 at 3 v4 keeps 2\n",
            "",
            "B stage0_segment0 on 0 at 3 v2: no update comes after it",
        ),
        (
            "  update stage0 on 0 at 3 v4 keeps 2\n",
            "  update stage0 on 0 at 3 v4 keeps 2\n  reduce w0 on 0 at 3\n",
            "reduce w0 on 0 at 3: no update comes after it",
        ),
        (
            "  update stage1 on 1 at 3 v4\n",
            "  start reduce w0 on 1\n  update stage1 on 1 at 3 v4\n  wait reduce w0 on 1\n",
            "gradients are still on their way, by start reduce w0",
        ),
    ],
)
def test_wrong_versions_of_weights_raise_plan_error(old: str, new: str, words: str) -> None:
    assert old in STASHING
    with pytest.raises(PlanError, match=words):
        StepProgram.parse(STASHING.replace(old, new, 1)).check()


def synchronous() -> StepProgram:
    return Case("hybrid", 4, {"tp": 1, "pp": 2, "microbatches": 2}).compiled().step_program


def test_a_synchronous_step_reads_one_version_and_makes_the_next() -> None:
    program = synchronous()
    read = {i.version for i, stage, _ in program.everywhere() if stage >= 0}
    updates = [(i.name, i.version, i.keeps) for i in program.end if i.kind is Verb.UPDATE]
    assert (read, updates) == ({0}, [("stage0", 1, 1), ("stage1", 1, 1)])


def test_update_before_its_gradients_are_reduced_raises_plan_error() -> None:
    program = synchronous()
    *others, first, second = program.end
    reduce = next(n for n, i in enumerate(others) if i.kind is Verb.REDUCE)
    early = replace(program, end=(first, *others, second))
    with pytest.raises(PlanError, match=f"{others[reduce]}: no update comes after it"):
        early.check()
    started = replace(others[reduce], phase=Phase.START)
    waited = replace(others[reduce], phase=Phase.WAIT)
    others[reduce] = started
    with pytest.raises(PlanError, match=f"gradients are still on their way, by {started}"):
        replace(program, end=(*others, first, second, waited)).check()


def asynchronous(plan: str = "pipedream") -> StepProgram:
    return Case(plan, 2, {"microbatches": 4}).compiled().step_program


def test_an_asynchronous_program_is_accepted_and_read_back() -> None:
    program = asynchronous()
    program.check()
    assert StepProgram.parse(str(program)) == program
    updates = [i for block in program.blocks.values() for i in block if i.kind is Verb.UPDATE]
    assert [(str(i), i.keeps) for i in updates] == [
        ("update stage0 on 0 keeps 2", 2),
        ("update stage1 on 1", 1),
    ]
    assert [line for line in str(program).splitlines() if line.strip().startswith("0F")] == [
        "  0F0", "  0F1", "  0F2 v1", "  0F3 v2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "plan, old, new, words",
    [
        ("pipedream", " keeps 2", "", "version 0 of the weights of stage0 is not kept"),
        ("pipedream", "0F2 v1", "0F2 v2", "version 2 of the weights of stage0 is not kept"),
        ("pipedream", "0B2 v1", "0B2 v2", "has read version 1 for microbatch 2, and reads"),
        ("pipedream", "  1U3 v4\n", "", "no update comes after it"),
        ("pipedream", "  0B3 v2\n", "", "0U3: no gradients of its microbatch"),
        ("ampnet", "0B2 v2", "0B2 v1", "version 1 of the weights of stage0 is not kept"),
    ],
)
def test_wrong_versions_of_events_raise_plan_error(
    plan: str, old: str, new: str, words: str
) -> None:
    text = str(asynchronous(plan))
    assert old in text
    with pytest.raises(PlanError, match=words):
        StepProgram.parse(text.replace(old, new, 1)).check()


@pytest.mark.parametrize(
    "text", ["update stage0 on 0,1 v1", "update stage3 on 2 at 7 v12 keeps 2", "W a on 0 v3"]
)
def test_instructions_with_versions_round_trip_through_text(text: str) -> None:
    assert str(StepInstruction.parse(text)) == text
