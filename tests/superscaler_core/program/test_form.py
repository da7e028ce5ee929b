"""Form: what the parts of a step program have to agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.program.event import Event, OverlappedPair
from superscaler_core.program.form import check_form
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import Phase, Verb
from superscaler_core.schedules import Action
from tests.superscaler_core.program.few import compiled

Change = Callable[[StepInstruction], StepInstruction]


def changed(program: ss.StepProgram, kind: Verb, change: Change) -> ss.StepProgram:
    """A program whose first instruction of a kind is changed in each block."""
    blocks = {}
    for key, block in program.blocks.items():
        number = next((n for n, i in enumerate(block) if i.kind is kind), None)
        new = list(block)
        if number is not None:
            new[number] = change(block[number])
        blocks[key] = tuple(new)
    return replace(program, blocks=blocks)


Events = tuple[Event, ...]
X = Value(Role.RESULT, "x")
INSTRUCTIONS: list[tuple[str, Verb, Change, str]] = [
    ("windows", Verb.FORWARD, lambda i: replace(i, devices=(7,)), "device 7 does not take part"),
    ("windows", Verb.FORWARD, lambda i: replace(i, reads=(replace(X, devices=(7,)),)),
     "device 7 does not take part"),
    ("windows", Verb.FORWARD, lambda i: replace(i, half=1), "has a half, and is done once"),
    ("windows", Verb.FORWARD, lambda i: replace(i, phase=Phase.START), "only communication has"),
    ("windows", Verb.FORWARD, lambda i: replace(i, writes=i.writes[:-1]), "follows that it"),
    ("windows", Verb.BACKWARD, lambda i: replace(i, frees=()), "follows that it"),
    ("windows", Verb.FORWARD, lambda i: replace(i, frees=(X,)), "it frees values that it uses"),
    ("windows", Verb.FORWARD, lambda i: replace(i, reads=i.reads[:1] * 2), "a value twice"),
    ("windows", Verb.UNSHARD, lambda i: replace(i, phase=Phase.START), "follows that it"),
    ("windows", Verb.BACKWARD, lambda i: replace(i, writes=(Value(Role.SUM, "x"),)),
     "its forward does not read what sum:x is a gradient of"),
    ("experts", Verb.MOVE, lambda i: replace(i, reads=tuple(replace(v, devices=(0,)) for v in
     i.reads), writes=tuple(replace(v, devices=(0,)) for v in i.writes), frees=()),
     "device 1 neither writes nor reads what moves"),
    ("halves", Verb.FORWARD, lambda i: replace(i, half=None), "needs a half"),
]  # fmt: skip


@pytest.mark.parametrize("mechanism, kind, change, words", INSTRUCTIONS)
def test_instructions_of_another_form_are_refused(
    mechanism: str, kind: Verb, change: Change, words: str
) -> None:
    with pytest.raises(ss.PlanError, match=words):
        check_form(changed(compiled(mechanism).step_program, kind, change))


@pytest.mark.parametrize(
    "mechanism, change, words",
    [
        ("stages", lambda e: (*e, Action.parse("9F0")), "9F0: stage 9 has no block F"),
        ("stages", lambda e: (*e, e[0]), "0F0 is run 2 times"),
        ("stages", lambda e: e[1:], "no F of microbatch 0 at stage 0"),
        ("stages", lambda e: tuple(x for x in e if "2" not in str(x)), "runs 0 to 2; there are"),
        ("routes", lambda e: (*e, Action.parse("2F0")), "of routes .*: it goes one of 2 routes"),
        ("pairs", lambda e: (*e, OverlappedPair(Action.parse("0F3"), Action.parse("0F2"))),
         "is run 2 times"),
    ],
)  # fmt: skip
def test_events_that_do_not_agree_are_refused(
    mechanism: str, change: Callable[[Events], Events], words: str
) -> None:
    program = compiled(mechanism).step_program
    with pytest.raises(ss.PlanError, match=words):
        check_form(replace(program, events=change(program.events)))


@pytest.mark.parametrize(
    "kind, words",
    [(Verb.LOSS, "around all stages, not in a block"), (Verb.FORWARD, "in a stage's block, not")],
)
def test_kinds_of_the_other_place_are_refused(kind: Verb, words: str) -> None:
    program = compiled("windows").step_program
    (key, block), end = next(iter(program.blocks.items())), program.end
    moved = next(i for i in (*block, *end) if i.kind is kind)
    in_block = replace(program, blocks={**program.blocks, key: (*block, moved)})
    at_end = replace(program, end=(*end, moved))
    with pytest.raises(ss.PlanError, match=words):
        check_form(in_block if kind is Verb.LOSS else at_end)


@pytest.mark.parametrize("routes", [3, 9])
def test_stages_that_are_not_equal_routes_are_refused(routes: int) -> None:
    program = compiled("routes").step_program
    with pytest.raises(ss.PlanError, match=f"are not {routes} routes of equal size"):
        check_form(replace(program, num_routes=routes))


def test_a_pair_that_differs_from_its_blocks_is_refused() -> None:
    program = compiled("pairs").step_program
    pair, block = next(iter(program.pairs.items()))
    less = {**program.pairs, pair: tuple(i for i in block if i.kind is not Verb.FORWARD)}
    with pytest.raises(ss.PlanError, match="it has 'move e3' where 'F stage0_segment0' comes next"):
        check_form(replace(program, pairs=less))
    with pytest.raises(ss.PlanError, match="there is no block of such pairs"):
        check_form(replace(program, pairs={}))


def _with_fewer_reads(instruction: StepInstruction) -> StepInstruction:
    (first, *reads), frees = instruction.reads, instruction.frees
    return replace(instruction, reads=tuple(reads), frees=tuple(v for v in frees if v != first))


def test_two_runs_of_a_segment_read_the_same_values() -> None:
    program = compiled("turns").step_program
    with pytest.raises(ss.PlanError, match="another run of this segment reads"):
        check_form(changed(program, Verb.FORWARD, _with_fewer_reads))
