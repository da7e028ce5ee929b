"""Versions of weights: which version a step program may read, and when it may update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.program.step_program import StepProgram
from superscaler_core.program.verb import Verb
from tests.superscaler_core.cases import Case


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
    with pytest.raises(PlanError, match=r"update .*grad:.*no reduction has added to it"):
        replace(program, end=(first, *others, second)).check()
    number = next(n for n, i in enumerate(others) if i.kind is Verb.REDUCE)
    started, waited = others[number].started(), others[number].waited()
    others[number] = started
    replace(program, end=(*others, waited, first, second)).check()
    with pytest.raises(PlanError, match=r"update .*grad:.*no reduction has added to it"):
        replace(program, end=(*others, first, second, waited)).check()


def asynchronous(plan: str = "pipedream") -> StepProgram:
    return Case(plan, 2, {"microbatches": 4}).compiled().step_program


@pytest.mark.parametrize("update, behind", [("0U1", "0B2"), ("1U1", "1B2")])
def test_an_update_follows_the_last_backward_of_its_microbatches(update: str, behind: str) -> None:
    text = str(asynchronous("pipedream_2bw"))
    lines = text.splitlines()
    number = next(n for n, line in enumerate(lines) if line.strip().startswith(f"{update} "))
    line = lines.pop(number)
    lines.insert(next(n for n, x in enumerate(lines) if x.strip().startswith(behind)) + 1, line)
    with pytest.raises(PlanError, match=f"{update}: 3 microbatches .* comes after 2, and applies"):
        StepProgram.parse("\n".join(lines)).check()


@pytest.mark.parametrize(
    "plan, old, new, words",
    [
        ("pipedream", " keeps 2", "", "version 0 of the weights of stage0 is not kept"),
        ("pipedream", "0F2 v1", "0F2 v2", "version 2 of the weights of stage0 is not kept"),
        ("pipedream", "0B2 v1", "0B2 v2", "has read version 1 for microbatch 2, and reads"),
        ("pipedream", "0U1 v2", "0U1 v3", "update stage0 on 0 v3 .*: the next version .* is 2"),
        ("pipedream", "  1U3 v4\n", "", "nothing takes sum:.* before the step ends"),
        ("pipedream", "  0B3 v2\n", "", "3: update .*sum:.* is not there: no backward has added"),
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
