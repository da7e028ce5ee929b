"""Short runs of the fuzzers with a fixed seed; the commands of this folder run longer ones.

CONTRIBUTING.md lists the commands, such as ``python -m tests.fuzz.pairs --pairs 10000``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import rvdcomm as rv
from rvdcomm import native
from tests.dist.world import ProcessWorld
from tests.fuzz import faults, pairs, parsers, processes, programs, soak
from tests.fuzz.command import Report
from tests.fuzz.draw import draw
from tests.fuzz.soak import Held, thirds
from tests.fuzz.tensors import whole_parts
from tests.fuzz.texts import TARGETS
from tests.oracle import shards_of, sliced
from tests.superscaler_core.program.mutants import Mutant

SEED = 1
NUM_PAIRS = 200
PAIRS_A_TEST = 50


@pytest.mark.parametrize("first", range(0, NUM_PAIRS, PAIRS_A_TEST))
def test_random_pairs_give_correct_data_and_counts(first: int) -> None:
    report = pairs.fuzz(SEED, range(first, first + PAIRS_A_TEST))
    assert report.findings == []
    assert report.counts["pairs"] == PAIRS_A_TEST


def test_random_pairs_cover_every_kind() -> None:
    kinds = sum((pairs.kinds_of(draw(SEED, i)) for i in range(NUM_PAIRS)), start=pairs.Counter())
    wanted = [
        *("on the same ranks", "on disjoint ranks", "on overlapping ranks", "even", "uneven"),
        *(f"of {num_dims} dims" for num_dims in range(5)),
        *(f"on {num_levels} levels" for num_levels in (1, 2, 3)),
        *("with parts", "without parts", "with a memory limit"),
        "lowered for domains and slices, too",
    ]
    assert [kind for kind in wanted if not kinds[kind]] == []


@pytest.mark.dist
def test_random_pairs_run_on_processes_with_every_executor() -> None:
    world = ProcessWorld(6, processes.TIMEOUT_SECS)
    try:
        report = processes.fuzz(world, SEED, range(30))
    finally:
        world.stop()
    assert report.findings == []
    assert report.counts["pairs"] == 30


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_changed_step_programs_are_refused_or_train_the_same(first: int) -> None:
    report = programs.fuzz(SEED, 60, programs.CASES[first :: len(programs.CASES) // 8])
    assert report.findings == []
    assert sum(n for name, n in report.counts.items() if "refused by" in name) > 48


@pytest.mark.parametrize("run", [programs.trained, programs.executed])
def test_a_step_program_that_is_not_changed_trains_the_same(run: programs.Run) -> None:
    case = programs.CASES[0]
    tried = programs.Tried(case, compiled := case.compiled())
    unchanged = Mutant("none", "nothing", compiled.step_program)
    assert tried.result(unchanged, run) == programs.EQUAL


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_texts_raise_only_documented_errors(target: str) -> None:
    report = parsers.fuzz(SEED, 0.7, target)
    assert report.findings == []
    assert sum(count for name, count in report.counts.items() if "slowest" not in name) > 0


@pytest.mark.dist
@pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted")
def test_random_faults_never_give_a_call_wrong_data() -> None:
    report = faults.fuzz(SEED, range(faults.BATCH // 2))
    assert report.findings == []
    assert report.counts["calls that raise"] > 0 < report.counts["calls that return"]


@pytest.mark.dist
@pytest.mark.alone
def test_loop_of_calls_does_not_leak_resources() -> None:
    world = ProcessWorld(soak.NUM_RANKS)
    try:
        report = soak.soak(world, 2.0)
    finally:
        world.stop()
    assert report.findings == []
    assert report.counts["looks"] >= 3


def test_thirds_gives_the_medians_of_the_first_and_last_third() -> None:
    held = [Held(rss_bytes=1000 * i, fds=7, threads=2, shm_files=0) for i in range(16)]
    first, last = thirds(held)
    assert (first["rss_bytes"], last["rss_bytes"]) == (5500, 13500)
    assert (first["fds"], last["fds"]) == (7, 7)


# --- the fuzzers find faults ---------------------------------------------------------------------


def test_pair_fuzzer_finds_a_missing_instruction() -> None:
    case = next(case for case in (draw(SEED, i) for i in range(99)) if len(case.src.ranks) > 2)
    program = rv.plan(case.src, case.dst, case.dtype, case.topology).program
    broken = replace(program, instructions=program.instructions[:-1])
    shards = shards_of(case.src, case.parts())
    assert pairs.faults_of_program(case, program, shards) == []
    assert len(pairs.faults_of_program(case, broken, shards)) >= 2


def test_process_fuzzer_finds_a_wrong_result_of_one_rank() -> None:
    case = next(case for case in (draw(SEED, i, 4) for i in range(99)) if case.dst.rvd.v == 1)
    whole = sum(whole_parts(case))
    right: list[processes.Results | None] = [None] * 4
    for rank in {*case.src.ranks, *case.dst.ranks}:
        cell = case.dst.cell(rank) if rank in case.dst else None
        right[rank] = {"a call": None if cell is None else sliced(whole, cell.box).copy()}
    assert processes.faults_of(case, right) == []
    victim = next(rank for rank in case.dst.ranks if case.dst.cell(rank).box.num_elements)
    right[victim]["a call"] = right[victim]["a call"] + 1  # type: ignore[index]
    assert processes.faults_of(case, right) != []


def test_parser_fuzzer_reports_an_undocumented_exception_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = Report("a reader that is broken")
    broken = replace(TARGETS["box"], check=lambda text: text[99])
    monkeypatch.setitem(TARGETS, "box", broken)
    parsers.try_text(report, "box", "[0:4]")
    parsers.try_text(report, "box", "[0:5]")
    assert len(report.findings) == 1
    assert report.findings[0].startswith("box: IndexError at ")


def test_parser_fuzzer_finds_a_text_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(text: str) -> str:
        while True:
            pass

    monkeypatch.setitem(TARGETS, "box", replace(TARGETS["box"], check=spin))
    monkeypatch.setattr(parsers, "CPU_SECS", 0.05)
    report = Report("a reader that hangs")
    parsers.try_text(report, "box", "[0:4]")
    assert report.findings[0].startswith("box: TooSlowError at ")
