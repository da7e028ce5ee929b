"""Text: a step program as lines; operands stand in its section of values, once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import superscaler_core as ss
from tests.superscaler_core.program.few import FEW, FEWER, compiled
from tests.superscaler_core.program.mutants import is_accepted, mutant


@pytest.mark.parametrize("mechanism", FEW)
def test_parse_undoes_str(mechanism: str) -> None:
    program = compiled(mechanism).step_program
    assert ss.StepProgram.parse(str(program)) == program


@pytest.mark.parametrize("mechanism", FEWER)
def test_every_change_that_the_check_accepts_is_read_back(mechanism: str) -> None:
    rng = random.Random(mechanism)
    program = compiled(mechanism).step_program
    changed = [mutant(program, rng).program for _ in range(80)]
    accepted = [one for one in changed if is_accepted(one)]
    assert accepted
    assert [str(one) for one in accepted if ss.StepProgram.parse(str(one)) != one] == []


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.replace("  F stage0_segment0 on 0\n", "  Q stage0_segment0 on 0\n"), "line 5"),
        (lambda t: t[: t.index("order:")], "before its section 'order:'"),
        (lambda t: t.replace("values:\n", "values:\n  loss loss on 0,1: loss:other\n"),
         "another line"),
        (lambda t: t.replace("on 0,1", f"on 0,{'1' * 5000}", 1), "line 1"),
        (lambda t: t.replace("  0F0", "  p2p e3 0 v1\n  0F0"), "an event without a version"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_program_is_refused_with_its_line(
    change: Callable[[str], str], words: str
) -> None:
    text = str(compiled("windows").step_program)
    with pytest.raises(ss.PlanError, match=words):
        ss.StepProgram.parse(change(text))


def test_empty_lines_say_nothing() -> None:
    program = compiled("windows").step_program
    assert ss.StepProgram.parse(str(program).replace("\n", "\n\n")) == program
