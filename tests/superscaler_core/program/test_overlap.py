"""Overlap rewrites: results do not change, and communication starts earlier."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.plans import PLANS
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.overlap import OF_MOVES, overlapped, reach_of
from superscaler_core.program.rewrites import rewritten
from superscaler_core.program.verb import COMPUTING, Phase, Verb
from tests.superscaler_core.cases import ASYNCHRONOUS, Case, check_trains
from tests.superscaler_core.plans.test_halves import CASES as HALVES
from tests.superscaler_core.plans.test_plans import CASES as OTHER_CASES
from tests.superscaler_core.program.test_step_program import CASES as PLAN_CASES
from tests.superscaler_core.program.test_step_program import OVERLAP

TRAINED = (
    "zero1", "zero3", "zero3_offload", "megatron_sp", "interleaved", "zero_bubble", "dualpipe",
    "expert_parallel", "coshard", "interlaced", "swap", "dap_pipeline", "mesh_2d", "chimera",
)  # fmt: skip
"""Plans with communication of every kind, and at every place of a step."""

DEEP = replace(OVERLAP, prefetch=3, bucket_bytes=1)
MOVES = ss.Overlap(moves=True)
CASES = [
    *(replace(case, overlap=MOVES) for case in (*OTHER_CASES[1::7], *HALVES[1::4])),
    *(replace(case, overlap=OVERLAP) for case in PLAN_CASES[: len(PLANS)] if case.plan in TRAINED),
    *(
        replace(case, overlap=DEEP)
        for case in OTHER_CASES
        if case.plan.startswith(("zero1", "zero2", "zero3"))
    ),
    replace(Case("hybrid", 4, {"tp": 1, "pp": 2, "microbatches": 2, "zero": 1}), overlap=DEEP),
]


@pytest.mark.many(12)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_with_overlap_train_the_same_weights_as_one_device(
    case: Case, tmp_path: Path
) -> None:
    compiled = case.compiled()
    program = compiled.step_program
    program.check()
    assert ss.StepProgram.parse(str(program)) == program
    check_trains(case, tmp_path, 1e-10, compiled=compiled)


# --- positions of communication -----------------------------------------------------------------


def program_of(
    overlap: ss.Overlap, plan: str = "zero3", sizes: dict[str, int] | None = None, **options: object
) -> ss.StepProgram:
    return Case(plan, 2, options, sizes=sizes or {}, overlap=overlap).compiled().step_program


def places(block: tuple[StepInstruction, ...], kind: Verb, phase: Phase) -> list[int]:
    """Where communication of a kind starts, or ends."""
    return [n for n, i in enumerate(block) if i.kind is kind and i.phase in (phase, Phase.WHOLE)]


@pytest.mark.parametrize("depth", [1, 2])
def test_prefetch_starts_gathers_ahead_by_its_depth(depth: int) -> None:
    block = program_of(ss.Overlap(prefetch=depth)).blocks[0, "F"]
    starts, waits = (places(block, Verb.UNSHARD, p) for p in (Phase.START, Phase.WAIT))
    names = [block[n].name for n in waits]
    assert [block[n].name for n in starts] == names
    # When the ops of a window run, the next ``depth`` gathers have been started.
    for index, wait in enumerate(waits):
        assert sum(start <= wait + depth for start in starts) >= min(index + 1 + depth, len(names))


def test_at_most_depth_plus_one_windows_are_gathered_at_once() -> None:
    for depth in (1, 2):
        for block in program_of(ss.Overlap(prefetch=depth)).blocks.values():
            there = 0
            for i in block:
                there += i.kind is Verb.UNSHARD and i.phase is not Phase.WAIT
                there -= i.kind in (Verb.RESHARD, Verb.REDUCE)
                assert there <= 1 + depth


def test_reductions_start_inside_the_last_backward() -> None:
    program = program_of(ss.Overlap(reductions=True, bucket_bytes=1), "accumulate", microbatches=3)
    block = program.blocks[0, "B"]
    starts = [i for i in block if (i.kind, i.phase) == (Verb.REDUCE, Phase.START)]
    most = ss.Overlap(reductions=True).most_reductions
    assert len(starts) > 3
    assert {i.microbatch for i in starts} == {2}
    whole = [i for i in program.end if i.phase is Phase.WHOLE]
    assert [i.kind for i in whole] == [Verb.LOSS, Verb.UPDATE]
    under_way = 0
    for i in block:
        under_way += {Phase.START: 1, Phase.WAIT: -1}.get(i.phase, 0)
        assert under_way <= most
    # Most reductions start before the last backward.
    last = max(n for n, i in enumerate(block) if i.kind is Verb.BACKWARD)
    assert sum(n < last for n, i in enumerate(block) if i in starts) > len(starts) // 2


def test_shared_weights_are_reduced_at_the_end() -> None:
    case = Case("one_f_one_b", 2, {"microbatches": 2}, sizes={"tied": True, "layers": 2})
    program = replace(case, overlap=ss.Overlap(reductions=True)).compiled().step_program
    reduce, loss, *_ = program.end
    assert (reduce.kind, reduce.phase, loss.kind) == (Verb.REDUCE, Phase.WHOLE, Verb.LOSS)


@pytest.mark.parametrize(
    "memory_bytes, early, most",
    [(0, [], 0), (40, ["w1"], 1), (70, ["w1", "w2"], 1), (100, ["w1", "w2"], 2)],
)
def test_weights_that_are_gathered_ahead_fit_into_the_memory(
    memory_bytes: int, early: list[str], most: int
) -> None:
    sizes = {"w0": 30, "w1": 40, "w2": 60}
    overlap = ss.Overlap(prefetch=2, memory_bytes=memory_bytes)
    program = program_of(ss.Overlap(), sizes={"layers": 3})
    block = rewritten(program, overlap, bytes_of=lambda i: sizes.get(i.name, 1000)).blocks[0, "F"]
    assert [i.name for i in block if i.phase is Phase.START] == early
    under_way = accumulate({Phase.START: 1, Phase.WAIT: -1}.get(i.phase, 0) for i in block)
    assert max(under_way) == most


def test_a_plan_bounds_the_weights_that_are_gathered_ahead_by_its_memory() -> None:
    counts = []
    for memory_bytes in (0, 1 << 30):
        block = program_of(ss.Overlap(prefetch=2, memory_bytes=memory_bytes)).blocks[0, "F"]
        counts.append(sum((i.kind, i.phase) == (Verb.UNSHARD, Phase.START) for i in block))
    assert counts[0] == 0 < counts[1]


# --- any program --------------------------------------------------------------------------------

ALL = ss.Overlap(prefetch=1, reductions=True, moves=True)
PLAIN = [case for case in PLAN_CASES if case.plan not in ASYNCHRONOUS]


def done_by(program: ss.StepProgram, device: int) -> tuple[list[str], list[str]]:
    """What a device computes, in order; and its communication, each once, sorted."""
    mine = [i for i, _ in program.instructions(device)]
    computing = [i.short for i in mine if i.kind in COMPUTING]
    others = (i for i in mine if i.kind not in COMPUTING and i.phase is not Phase.START)
    return computing, sorted(f"{i.kind} {i.name} {i.half}" for i in others)


@pytest.mark.parametrize("case", PLAIN[::2], ids=str)
def test_each_device_runs_the_same_up_to_positions_of_starts_and_waits(case: Case) -> None:
    plain = case.compiled().step_program
    reach = {**OF_MOVES, **reach_of(ALL)}
    early = overlapped(plain, reach)
    early.check()
    assert overlapped(ss.StepProgram.parse(str(plain)), reach) == early
    for device in plain.devices:
        assert done_by(early, device) == done_by(plain, device)


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_a_rewritten_program_stays_as_it_is_when_it_is_rewritten_again(case: Case) -> None:
    program = case.compiled().step_program
    assert overlapped(program, {**OF_MOVES, **reach_of(case.overlap)}) == program


# --- errors -------------------------------------------------------------------------------------


def without(program: ss.StepProgram, phase: Phase) -> ss.StepProgram:
    """The program without the first instruction of a phase in its blocks."""
    blocks = dict(program.blocks)
    for key, block in blocks.items():
        place = next((n for n, i in enumerate(block) if i.phase is phase), None)
        if place is not None:
            blocks[key] = (*block[:place], *block[place + 1 :])
            return replace(program, blocks=blocks)
    raise AssertionError(phase)


@pytest.mark.parametrize(
    "phase, words",
    [
        (Phase.START, "it was not started"),
        (Phase.WAIT, "not gathered|exists already|nothing takes"),
    ],
)
def test_start_without_wait_and_wait_without_start_are_rejected(phase: Phase, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        without(program_of(ss.Overlap(prefetch=1, reductions=True)), phase).check()


@pytest.mark.parametrize(
    "plan, overlap",
    [
        ("megatron", ss.Overlap(prefetch=1)),
        ("one_f_one_b", ss.Overlap(reductions=True)),
        ("data_parallel", ss.Overlap(moves=True)),
    ],
)
def test_overlap_does_not_change_a_program_without_such_communication(
    plan: str, overlap: ss.Overlap
) -> None:
    program = program_of(ss.Overlap(), plan)
    assert rewritten(program, overlap) == program
