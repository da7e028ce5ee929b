"""Bound: a program that is read from its text, or rewritten, is a program of its plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.program.bound import check_bound
from superscaler_core.program.event import P2PSend
from superscaler_core.program.freed import freed_block
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import MOVES, OF_WEIGHTS, OWN, Verb
from superscaler_core.schedules import ActionKind
from tests.superscaler_core.cases import Case
from tests.superscaler_core.program.few import FEW, FEWER, compiled
from tests.superscaler_core.program.test_step_program import CASES

ALL = [FEW[name] for name in (*FEWER, "routes", "spans", "versions", "pairs")] + CASES[-1:]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_parsed_program_has_the_files_memory_and_time_of_the_original(case: Case) -> None:
    original = case.compiled()
    parsed = original.with_program(ss.StepProgram.parse(str(original.step_program)))
    assert parsed.step_program == original.step_program
    assert parsed.files == original.files
    assert parsed.memory == original.memory
    assert ss.simulate(parsed, "v100").secs == ss.simulate(original, "v100").secs


# --- programs of other plans --------------------------------------------------------------------


def changed(
    program: ss.StepProgram, kind: Verb, change: Callable[[StepInstruction], StepInstruction]
) -> ss.StepProgram:
    """A program whose instructions of a kind are changed, with the values that follow."""

    def new(old: StepInstruction) -> StepInstruction:
        made = change(old)
        frees = tuple(v for v in old.frees if v.role not in OWN[kind].frees)
        made = made.with_values(made.given_reads, made.given_writes)
        return replace(made, frees=(*frees, *made.frees))

    blocks = {
        key: tuple(new(i) if i.kind is kind else i for i in block)
        for key, block in program.blocks.items()
    }
    return replace(program, blocks=blocks)


@pytest.mark.parametrize("key, change, words", [
    ((0, ActionKind.FORWARD), lambda b: without_a_summand(b), "part:.* has no term of stage0_"),
    ((0, ActionKind.BACKWARD), lambda b: with_the_loss(b), "unlike in the plan, it writes loss:"),
])  # fmt: skip
def test_a_block_adds_the_terms_to_sums_that_it_adds_in_the_plan(
    key: tuple[int, ActionKind], change: Callable[[Block], Block], words: str
) -> None:
    case = Case("coshard", 1, {"parts": 2, "keep": ss.Keep.BLOCK_INPUTS})
    program = case.compiled().step_program
    blocks = {**program.blocks, key: freed_block(change(program.blocks[key]))}
    with pytest.raises(ss.PlanError, match=words):
        case.compiled().with_program(replace(program, blocks=blocks))


def without_a_summand(block: Block) -> Block:
    """A block without one of the segments that keep nothing and add to a partial sum."""
    gone = next(
        i for i in block if i.kind is Verb.COMPUTE and any(v.role is Role.PARTIAL for v in i.writes)
    )
    return tuple(i for i in block if i is not gone)


def with_the_loss(block: Block) -> Block:
    """A block whose last forward adds to the loss too."""
    loss = Value(Role.LOSS, "loss")
    number = max(n for n, i in enumerate(block) if i.kind in (Verb.FORWARD, Verb.COMPUTE))
    last = block[number]
    return (
        *block[:number], replace(last, writes=(*last.given_writes, loss, *last.own[1])),
        *block[number + 1 :],
    )  # fmt: skip


def test_updates_apply_the_gradients_of_the_microbatches_of_the_plan() -> None:
    original = Case("pipedream", 2, {"microbatches": 4}).compiled()
    text = str(original.step_program)
    order = text.index("order:")
    names = {"0B1": "0B2", "0B2": "0B1"}
    offloaded = re.sub("0B[12]", lambda found: names[found[0]], text[order:])
    with pytest.raises(ss.PlanError, match=r"sent-back|applies gradients of microbatches \[2\]"):
        original.with_program(ss.StepProgram.parse(text[:order] + offloaded))


def test_a_program_of_another_model_is_refused() -> None:
    own = compiled("windows")
    with pytest.raises(ss.PlanError, match="model: 'other'; the plan's: 'GPT'"):
        own.with_program(replace(own.step_program, name="other"))


def test_a_program_of_another_plan_is_refused() -> None:
    with pytest.raises(
        ss.PlanError, match=r"F stage0_segment0 on 0,1: unlike .*, it reads w:embed\.weight"
    ):
        compiled("windows").with_program(compiled("moves").step_program)


def test_a_move_of_another_value_is_refused() -> None:
    own = compiled("experts")
    move = next(i for b in own.step_program.blocks.values() for i in b if i.kind in MOVES)
    given = Value(Role.INPUT, "input_ids")
    program = changed(
        own.step_program, move.kind,
        lambda i: replace(i, reads=(*i.reads, given)) if i.name == move.name else i,
    )  # fmt: skip
    with pytest.raises(
        ss.PlanError, match=f"{move.kind} {move.name} .*: unlike in the plan, it reads in:"
    ):
        own.with_program(program)


def test_an_instruction_in_a_block_of_another_stage_is_refused() -> None:
    """A segment of stage 0 could run in stage 1, by its values, but stages have their own."""
    for mechanism in ("routes", "stages"):
        own = compiled(mechanism).step_program
        for run in (ActionKind.FORWARD, ActionKind.BACKWARD):
            for moved in own.blocks[0, run]:
                here = tuple(i for i in own.blocks[0, run] if i is not moved)
                there = (*own.blocks[1, run], moved)
                program = replace(own, blocks={**own.blocks, (0, run): here, (1, run): there})
                with pytest.raises(ss.PlanError, match="the plan has no such instruction"):
                    check_bound(program, own)


def test_communication_of_the_step_in_a_stage_of_other_devices_is_refused() -> None:
    """Only the devices of a stage run its block; the others would not come."""
    own = compiled("routes").step_program
    of_weights = [i for i in (*own.begin, *own.end) if i.kind in OF_WEIGHTS]
    assert of_weights
    for moved in of_weights:
        for key, block in own.blocks.items():
            program = replace(
                own,
                begin=tuple(i for i in own.begin if i is not moved),
                end=tuple(i for i in own.end if i is not moved),
                blocks={**own.blocks, key: (*block, moved)},
            )
            with pytest.raises(ss.PlanError, match=rf"does not run stage {key[0]}"):
                check_bound(program, own)


def test_a_transfer_that_the_plan_does_not_have_is_refused() -> None:
    own = compiled("stages")
    name = next(event.name for event in own.step_program.events if isinstance(event, P2PSend))
    text = re.sub(rf"\b{name}\b", "e99", str(own.step_program))
    with pytest.raises(ss.PlanError, match=r"e99 on .*: the plan has no such instruction"):
        own.with_program(ss.StepProgram.parse(text))
