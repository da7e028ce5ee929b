"""Check: what a step program needs in order to run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache

import pytest

import superscaler_core as ss
from superscaler_core.plan import Device
from superscaler_core.program import check as check_module
from superscaler_core.program.check import representatives
from superscaler_core.program.effect import effects_of
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import Phase, Verb
from tests.superscaler_core.cases import Case
from tests.superscaler_core.program.few import FEW, FEWER, compiled
from tests.superscaler_core.program.mutants import Place, blocks_of, is_accepted, mutant, with_block
from tests.superscaler_core.small import two_linears

# --- effects ------------------------------------------------------------------------------------

Live = dict[Device, set[str]]

DEVICES = range(4)
"""All devices of the programs here, and more."""


def live_after(block: Iterable[StepInstruction], before: Live, kind: str) -> Live:
    """The values of a kind that exist on every device after the instructions of a block."""
    live = {device: set(values) for device, values in before.items()}
    for instruction in block:
        alone = effects_of([instruction], instruction.devices, is_whole=False)
        for device, effect in getattr(alone, kind).items():
            assert effect.needs <= live[device]
            assert live[device].isdisjoint(effect.fresh)
            live[device] = (live[device] - effect.frees) | effect.makes
    return live


@pytest.mark.parametrize("kind", ["of_microbatch", "of_step"])
@pytest.mark.parametrize("mechanism", FEWER)
def test_the_effect_of_a_block_is_that_of_its_instructions_in_order(
    mechanism: str, kind: str
) -> None:
    for block in compiled(mechanism).step_program.all_blocks:
        effects = getattr(effects_of(block, DEVICES), kind)
        needed = {device: effect.needs for device, effect in effects.items()}
        after = {d: (e.needs - e.frees) | e.makes for d, e in effects.items()}
        assert live_after(block, needed, kind) == after


@pytest.mark.parametrize("mechanism", FEWER)
def test_a_block_without_a_value_that_it_needs_stops_at_its_reader(mechanism: str) -> None:
    for block in compiled(mechanism).step_program.all_blocks:
        for kind in ("of_microbatch", "of_step"):
            effects = getattr(effects_of(block, DEVICES), kind)
            needed = {device: set(effect.needs) for device, effect in effects.items()}
            for device, keys in needed.items():
                for key in sorted(keys):
                    less = {**needed, device: keys - {key}}
                    with pytest.raises(AssertionError):
                        live_after(block, less, kind)


# --- mutants by name ----------------------------------------------------------------------------


def exchanged(text: str, one: str, other: str) -> str:
    """A text in which the first of two lines stands where the other does."""
    assert one in text
    assert other in text
    return text.replace(one, "@", 1).replace(other, one, 1).replace("@", other, 1)


def without(text: str, *lines: str) -> str:
    """A text without the first of each of these lines."""
    for line in lines:
        assert line in text
        text = text.replace(line, "", 1)
    return text


def late_send(text: str) -> str:
    """A text whose first transfer stands behind its reader."""
    lines = text.splitlines()
    p2p_send = next(line for line in lines if line.startswith("  p2p "))
    lines.remove(p2p_send)
    lines.insert(lines.index("  1F0") + 1, p2p_send)
    return "\n".join(lines)


def lines_without(text: str, word: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(f"  {word} "))


NAMED: dict[str, tuple[str, Callable[[str], str], str]] = {
    "a forward before the one whose result it reads": ("windows",
     lambda t: exchanged(t, "  F stage0_segment0 on 0\n", "  F stage0_segment1 on 0\n"),
     "unshard w1 on 0,1: .*copy:.* exists already, as it is read before"),
    "the backwards of two segments swapped": ("windows",
     lambda t: exchanged(t, "  B stage0_segment1 on 0\n", "  B stage0_segment0 on 0\n"),
     "unshard w0 on 0,1: .*copy:.* exists already, as it is read before"),
    "a forward without windows before the one whose result it reads": ("spans",
     lambda t: exchanged(t, "  F stage0_segment0 on 0\n", "  f stage0_segment1 on 0\n"),
     "is not made before it"),
    "the backwards of two segments without windows swapped": ("stages",
     lambda t: exchanged(t, "  B stage0_segment1 on 0\n", "  B stage0_segment0 on 0\n"),
     "d:.* is not made before it"),
    "a gather removed": ("windows", lambda t: without(t, "  unshard w0 on 0,1\n"),
     "copy:.* is not there: these weights are not gathered"),
    "a release removed": ("windows", lambda t: without(t, "  reshard w0 on 0,1\n"),
     "unshard w0 on 0,1: .*copy:.* exists already|copy:.* exists already"),
    "the loss removed": ("windows", lambda t: without(t, "  loss loss on 0,1\n"),
     "the step has no loss|nothing takes loss:loss before the step ends"),
    "a segment that keeps nothing twice": ("spans",
     lambda t: t.replace("  f stage0_segment1 on 0\n", "  f stage0_segment1 on 0\n" * 2, 1),
     "device 0 has run this segment in the block"),
    "the loss of the second half": ("stages",
     lambda t: t.replace("  loss loss on 0,1,2,3\n", "  loss loss on 0,1,2,3 half 1\n"),
     "it has a half, and is done once"),
    "a device twice": ("spans",
     lambda t: t.replace("  F stage0_segment0 on 0\n", "  F stage0_segment0 on 0,0\n"),
     "devices are ascending"),
    "a version of communication": ("windows",
     lambda t: t.replace("  unshard w0 on 0,1\n", "  unshard w0 on 0,1 v1\n"),
     "only segments and updates have a version"),
    "a reduction that keeps versions": ("windows",
     lambda t: t.replace("  reduce w0 on 0,1\n", "  reduce w0 on 0,1 keeps 2\n"),
     "only updates keep versions"),
    "a P2P send after its reader": ("stages", late_send, "sent:.*: no transfer has brought it"),
    "no P2P send": ("stages", lambda t: lines_without(t, "p2p"),
     "sent:.*: no transfer has brought it"),
}  # fmt: skip
"""By name, the mechanism of a program, a change of its text, and what the check says."""


@pytest.mark.parametrize("name", NAMED)
def test_named_mutants_are_refused(name: str) -> None:
    mechanism, change, words = NAMED[name]
    text = str(compiled(mechanism).step_program)
    ss.StepProgram.parse(text).check()
    with pytest.raises(ss.PlanError, match=words):
        ss.StepProgram.parse(change(text)).check()


def test_a_fetch_that_is_started_and_not_waited_for_is_refused() -> None:
    overlap = ss.Overlap(prefetch=2, reductions=True, bucket_bytes=4000)
    text = str(Case("zero1", 2, overlap=overlap).compiled().step_program)
    wait = next(line for line in text.splitlines() if line.startswith("  wait fetch"))
    for again in (wait.replace("wait", "start"), wait.replace("wait", "start").partition(" at")[0]):
        with pytest.raises(ss.PlanError, match="flight:fetch"):
            ss.StepProgram.parse(text.replace(wait, f"{wait}\n{again}", 1)).check()


@pytest.mark.parametrize("mechanism", FEWER)
def test_one_of_several_alike_devices_is_refused_for_all_of_them(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(mechanism).step_program
    assert set(representatives(program)) <= set(program.devices)
    rng = random.Random(mechanism)
    changed = [mutant(program, rng).program for _ in range(40)]
    answers = [is_accepted(one) for one in changed]
    monkeypatch.setattr(check_module, "representatives", lambda program: program.devices)
    assert [is_accepted(one) for one in changed] == answers


def test_alike_devices_have_one_representative() -> None:
    assert representatives(compiled("moves").step_program) == (0,)
    assert representatives(compiled("stages").step_program) == (0, 2)


# --- every kind of instruction ------------------------------------------------------------------

Change = Callable[[ss.StepProgram, Place, int], ss.StepProgram]
"""Changes a program at an instruction, given by its block and its position."""


@cache
def firsts() -> dict[tuple[Verb, Phase], tuple[ss.StepProgram, Place, int]]:
    """The first instruction of each kind in the programs of ``FEW``: its program, block, position.

    RECOMPUTE is left out: a backward recomputes what was not recomputed, and doing it twice changes
    nothing.
    """
    found: dict[tuple[Verb, Phase], tuple[ss.StepProgram, Place, int]] = {}
    for mechanism in FEW:
        program = compiled(mechanism).step_program
        for place, block in blocks_of(program).items():
            for number, i in enumerate(block):
                if i.kind is not Verb.RECOMPUTE and not i.stays and place[0] != "pairs":
                    found.setdefault((i.kind, i.phase), (program, place, number))
    return found


def accepted_if(change: Change) -> list[tuple[Verb, Phase]]:
    """The kinds of instructions of which one may be changed in its block."""
    return [
        kind
        for kind, (program, place, number) in firsts().items()
        if is_accepted(change(program, place, number))
    ]


def less(program: ss.StepProgram, place: Place, number: int) -> ss.StepProgram:
    block = blocks_of(program)[place]
    return with_block(program, place, (*block[:number], *block[number + 1 :]))


def twice(program: ss.StepProgram, place: Place, number: int) -> ss.StepProgram:
    block = blocks_of(program)[place]
    return with_block(program, place, (*block[:number], block[number], *block[number:]))


def outside(program: ss.StepProgram, place: Place, number: int) -> ss.StepProgram:
    moved, changed = blocks_of(program)[place][number], less(program, place, number)
    # Weights may be gathered before the step; then they are there for their first release.
    other = "end" if place[0] == "begin" or moved.kind is Verb.UNSHARD else "begin"
    return with_block(changed, (other, None), (moved, *getattr(changed, other)))


def test_programs_of_all_mechanisms_have_all_kinds_of_instructions() -> None:
    assert {kind for kind, _ in firsts()} == {*Verb} - {Verb.RECOMPUTE}


def test_a_program_without_one_of_its_instructions_is_refused() -> None:
    assert accepted_if(less) == []


def test_a_program_with_one_of_its_instructions_twice_is_refused() -> None:
    assert accepted_if(twice) == []


def test_an_instruction_is_refused_before_the_step_or_after_it() -> None:
    assert accepted_if(outside) == []


def test_a_replica_that_does_not_store_its_weight_makes_a_gradient_that_is_dropped() -> None:
    plan = ss.Plan(two_linears(), range(2))
    for op in plan.graph.ops:
        plan.op_assign(plan.op_trans(op, ss.replicate(2)), range(2))
    plan.op_assign(plan.update("up.weight"), 1)
    text = str(ss.compile(plan).step_program)
    text = "\n".join(line for line in text.splitlines() if "reduce r0" not in line)
    ss.StepProgram.parse(text.replace("grad:up.weight@(1)", "sum:up.weight@(1)")).check()
    with pytest.raises(ss.PlanError, match=r"grad:up\.weight"):
        ss.StepProgram.parse(text).check()
    with pytest.raises(ss.PlanError, match=r"nothing takes sum:up\.weight"):
        ss.StepProgram.parse(text.replace(", grad:up.weight@(1)", "")).check()
