"""Laws of the studies' machinery, on a small model: what is tuned fits, and the best is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.studies import cluster, report, transfers, tuning
from bench.studies.__main__ import main
from bench.studies.outcome import Outcome, _least_bytes, _stored_bytes, outcome_of
from bench.studies.study import STUDIES
from bench.studies.systems import (
    DEEPSPEED,
    INTERLACED,
    MEGATRON,
    NF1B,
    SAVINGS,
    System,
    Way,
    coshard,
    grids,
    zero3,
)
from bench.studies.tuning import best, outcomes
from bench.studies.workload import Workload, _captured, captured, compiled, keep_graphs
from superscaler_core.cli.sources import plan_source

TINY = Workload(
    "gpt",
    {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "vocabulary": 64, "fused": False},
    "float16",
    8,
)


@pytest.mark.parametrize("num_gpus", cluster.GPUS)
def test_tensor_parallel_leaves_a_host_as_a_last_resort(num_gpus: int) -> None:
    found = list(grids(num_gpus))
    assert len(set(found)) == len(found)
    assert all(tp * pp * dp == num_gpus for tp, pp, dp in found)
    for way in MEGATRON.ways(num_gpus):
        assert way.is_last_resort == (way.knobs["tp"] > cluster.PER_HOST)


def test_a_last_resort_is_tried_only_if_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    monkeypatch.setattr("bench.studies.outcome.FEW", 8)
    last = Way(1, {"tp": 1, "pp": 1}, is_last_resort=True)
    fits, huge = Way(1, {"tp": 1, "pp": 1}), Way(1, {"tp": 3, "pp": 1})
    assert len(list(outcomes(TINY, 1, system_of(last, fits)))) == 1
    refused, found = outcomes(TINY, 1, system_of(last, huge))
    assert "tp=3" in refused.problem
    assert not found.problem


@pytest.mark.parametrize("study", STUDIES.values(), ids=list(STUDIES))
def test_a_study_has_models_and_ways_for_every_number_of_gpus(study: Any) -> None:
    assert tuple(study.workloads) == cluster.GPUS
    for system in study.systems:
        assert all(next(system.ways(num), None) for num in cluster.GPUS)
    for workloads in study.workloads.values():
        for workload in workloads.values():
            # A batch can be cut into microbatches of all replicas, whatever their number.
            assert workload.batch % max(cluster.GPUS) == 0


@pytest.mark.parametrize("num_gpus", cluster.GPUS)
def test_ours_is_no_baseline_by_another_name(num_gpus: int) -> None:
    assert all(way.knobs["pp"] > 1 for way in NF1B.ways(num_gpus))
    assert all(num_gpus // way.knobs["tp"] > 1 for way in INTERLACED.ways(num_gpus))
    for way in coshard().ways(num_gpus):
        assert all(rung["coshard"] > 1 for ladder in way.ladders for rung in ladder)


HYBRID = plan_source("hybrid").call


def system_of(*ways: Way, sprogram: Any = HYBRID) -> System:
    return System("mine", sprogram, lambda num: iter(ways))


def test_outcomes_are_of_programs_that_fit() -> None:
    found = list(outcomes(TINY, 2, system_of(Way(2, {"tp": 1, "pp": 1}))))
    assert {o.problem for o in found} == {""}
    assert [o.microbatch for o in found] == [2, 4, 8][: len(found)]
    assert all(o.num_microbatches * o.microbatch == TINY.batch for o in found)
    for outcome in found:
        assert outcome.samples_per_sec == pytest.approx(TINY.batch / outcome.secs)
        assert sum(outcome.shares.values()) == pytest.approx(1.0)
    fastest = best(found)
    assert fastest is not None
    assert fastest.samples_per_sec == max(o.samples_per_sec for o in found)


def needs(way: Way, microbatch: int) -> list[int]:
    """Bytes that every rung of a way's first ladder needs."""
    found = []
    for saving in way.ladders[0]:
        chosen = way.with_knobs(saving)
        (memory,) = compiled(
            TINY, 1, plan_source("hybrid").call, chosen, microbatch
        ).memory.values()
        found.append(memory.total_bytes)
    return found


def said(found: list[Outcome]) -> list[tuple[str, int, bool]]:
    """Which ways were tried, with which microbatch, and whether they fit."""
    return [(str(o.way), o.microbatch, not o.problem) for o in found]


LADDER = Way(1, {"tp": 1, "pp": 1}, ladders=(({}, {"recompute": True}, {"rerun": True}),))


def test_memory_is_saved_only_where_nothing_fits_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recompute, rerun = needs(LADDER, 1)
    assert max(recompute, rerun) < plain
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    monkeypatch.setattr("bench.studies.outcome.FEW", 8)
    monkeypatch.setattr(cluster, "limit_bytes", lambda: plain)
    found = list(outcomes(TINY, 1, system_of(LADDER)))
    assert said(found) == [("dp=1", 1, True)]
    monkeypatch.setattr(cluster, "limit_bytes", lambda: plain - 1)
    found = list(outcomes(TINY, 1, system_of(LADDER)))
    assert said(found)[0] == ("dp=1", 1, False)
    assert said(found)[-1] == ("dp=1 recompute", 1, True)
    assert found[0].lacks_memory
    assert sum(found[0].peak_bytes.values()) == plain
    monkeypatch.setattr(cluster, "limit_bytes", lambda: min(recompute, rerun) - 1)
    found = list(outcomes(TINY, 1, system_of(LADDER)))
    assert said(found) == [("dp=1", 1, False), ("dp=1 rerun", 1, False)]


def test_larger_microbatches_save_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = needs(LADDER, 4)[0] - 1
    assert max(needs(LADDER, 2)[0], needs(LADDER, 4)[1]) <= limit
    monkeypatch.setattr(tuning, "MICROBATCHES", (2, 4))
    monkeypatch.setattr("bench.studies.outcome.FEW", 8)
    monkeypatch.setattr(cluster, "limit_bytes", lambda: limit)
    fitting = {
        o.microbatch: str(o.way) for o in outcomes(TINY, 1, system_of(LADDER)) if not o.problem
    }
    assert fitting == {2: "dp=1", 4: "dp=1 recompute"}


def test_the_next_ladder_is_for_what_does_not_fit_on_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = replace(LADDER, ladders=(({},), ({"recompute": True}, {"rerun": True})))
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    monkeypatch.setattr("bench.studies.outcome.FEW", 8)
    assert said(list(outcomes(TINY, 1, system_of(way)))) == [("dp=1", 1, True)]
    limit = needs(way, 4)[0] - 1
    assert needs(way, 2)[0] <= limit
    monkeypatch.setattr(cluster, "limit_bytes", lambda: limit)
    monkeypatch.setattr(tuning, "MICROBATCHES", (2, 4))
    assert said(list(outcomes(TINY, 1, system_of(way)))) == [
        ("dp=1", 2, True), ("dp=1", 4, False), ("dp=1 recompute", 4, True),
    ]  # fmt: skip


def test_what_cannot_be_cut_so_finely_is_tried_in_fewer_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    monkeypatch.setattr("bench.studies.outcome.FEW", 8)
    two, four, eight = ({"coshard": num} for num in (2, 4, 8))
    way = Way(1, {"tp": 1, "pp": 1}, ladders=((two, four),))
    in_two, in_four = needs(way, 1)
    assert in_four < in_two
    monkeypatch.setattr(cluster, "limit_bytes", lambda: in_four)
    found = list(outcomes(TINY, 1, system_of(replace(way, ladders=((two, four, eight),)))))
    assert [o.way.knobs["coshard"] for o in found] == [2, 8, 4]
    assert [o.lacks_memory for o in found] == [True, False, False]
    assert "it can be cut into 1, 2, 4" in found[1].problem
    assert not found[2].problem


def test_an_estimate_is_near_what_is_simulated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    workload = replace(TINY, batch=64)
    way = Way(1, {"tp": 1, "pp": 2}, ladders=(({},),))
    *estimates, full = outcomes(workload, 2, system_of(way))
    assert not full.is_estimate
    assert best([*estimates, full]) == full
    (same,) = (o for o in estimates if o.is_estimate and o.microbatch == full.microbatch)
    assert same.num_microbatches == full.num_microbatches > 8
    assert same.secs == pytest.approx(full.secs, rel=0.01)
    assert same.peak_bytes == full.peak_bytes


def test_what_is_simulated_in_full_is_the_very_way_that_was_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = replace(TINY, batch=64)
    (way,) = (way for way in MEGATRON.ways(2) if way.knobs["tp"] == 2)
    memory = compiled(workload, 2, MEGATRON.sprogram, way, 1, 64).memory
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    # No byte is left over, so a bound that took it for a way that cuts less would refuse it.
    monkeypatch.setattr(cluster, "limit_bytes", lambda: max(m.total_bytes for m in memory.values()))
    assert _stored_bytes(workload, way) < cluster.limit_bytes() < _stored_bytes(workload, Way(1))
    estimate, full = outcomes(workload, 2, replace(MEGATRON, ways=lambda num: iter([way])))
    assert (estimate.is_estimate, full.is_estimate) == (True, False)
    assert estimate.problem == full.problem == ""
    assert estimate.way == full.way == way.with_knobs(SAVINGS[0])


@pytest.mark.parametrize(
    ("in_full", "simulated", "fastest"),
    [((5.0, 4.0), (1,), 5.0), ((3.5, 3.9), (1, 2), 3.9), ((0.0, 2.0), (1, 2), 3.0)],
    ids=["as estimated", "the next is faster", "neither"],
)
def test_no_estimate_is_left_that_is_faster_than_what_was_simulated_in_full(
    monkeypatch: pytest.MonkeyPatch,
    in_full: tuple[float, ...],
    simulated: tuple[int, ...],
    fastest: float,
) -> None:
    first, second = (
        Outcome("mine", Way(dp), is_estimate=True, samples_per_sec=speed)
        for dp, speed in ((1, 5.0), (2, 4.0))
    )
    third = replace(first, way=Way(3), is_estimate=False, samples_per_sec=3.0)
    monkeypatch.setattr(tuning, "_estimates", lambda *words: iter([third, second, first]))

    def outcome_of(workload: Any, num: int, system: System, way: Way, *rest: Any, **_: Any) -> Any:
        speed = in_full[way.dp - 1]
        return Outcome("mine", way, problem="" if speed else "no", samples_per_sec=speed)

    monkeypatch.setattr(tuning, "outcome_of", outcome_of)
    found = list(outcomes(TINY, 1, system_of()))
    assert tuple(o.way.dp for o in found[3:]) == simulated
    chosen = best(found)
    assert chosen is not None
    assert chosen.samples_per_sec == fastest


def test_what_cannot_fit_is_not_planned() -> None:
    huge = replace(TINY, sizes={**TINY.sizes, "layers": 4, "width": 16384})
    (outcome,) = outcomes(huge, 1, system_of(Way(1, {"tp": 1, "pp": 1})))
    assert "weights and states alone need" in outcome.problem
    assert best([outcome]) is None


@pytest.mark.parametrize("system", [MEGATRON, DEEPSPEED, coshard("", "0")], ids=lambda s: s.name)
def test_every_way_of_a_system_runs_or_says_why_not(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MICROBATCHES", (2,))
    found = list(outcomes(TINY, 2, system))
    assert any(not o.problem for o in found)
    for outcome in found:
        assert bool(outcome.problem) != bool(outcome.samples_per_sec)


@pytest.mark.parametrize("system", [MEGATRON, DEEPSPEED], ids=lambda s: s.name)
@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_the_bound_on_memory_is_below_what_any_way_needs(system: System, num_gpus: int) -> None:
    for way in system.ways(num_gpus):
        if way.knobs.get("pp", 1) > TINY.sizes["layers"] or way.dp > 4:
            continue
        least = _least_bytes(TINY, way, num_gpus, 2 * way.dp)
        program = compiled(TINY, num_gpus, system.sprogram, way, 2 * way.dp, 4)
        assert 0 < least <= max(memory.total_bytes for memory in program.memory.values())
        if num_gpus == 1 and system is MEGATRON:
            # Nothing is missing but what comes and goes, and constants.
            (memory,) = program.memory.values()
            assert least >= 0.75 * memory.total_bytes


def test_what_keeps_too_much_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("bench.studies.outcome.compiled")
    way = Way(1, {"tp": 1, "pp": 1})
    limit = _least_bytes(TINY, way, 1, 1) - 1
    monkeypatch.setattr(cluster, "limit_bytes", lambda: limit)
    found = outcome_of(TINY, 1, system_of(way), way, 1)
    assert found.lacks_memory
    assert found.problem.startswith("needs at least")
    # Of what is computed again there is no such bound.
    assert not _least_bytes(TINY, way.with_knobs({"recompute": True}), 1, 1)


def test_offloading_leaves_the_gpu_less_to_hold() -> None:
    peaks = [
        next(iter(compiled(TINY, 2, zero3, Way(2, {"offload": o}), 2).memory.values())).total_bytes
        for o in (False, True)
    ]
    assert peaks[1] < peaks[0]


def test_graphs_that_are_kept_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.studies.workload._folders", [])
    keep_graphs(tmp_path / "graphs")
    made = captured(replace(TINY, dtype="float32"), 3)
    (kept,) = (tmp_path / "graphs").iterdir()
    assert kept.suffix == ".pickle"
    # What was made in this process is given again without looking there.
    assert captured(replace(TINY, dtype="float32"), 3) is made
    forgotten: Any = _captured
    forgotten.cache_clear()
    monkeypatch.delattr("bench.studies.workload._capture")
    again = captured(replace(TINY, dtype="float32"), 3)
    assert again is not made
    assert [op.name for op in again.ops] == [op.name for op in made.ops]
    assert [str(op.annotation) for op in again.ops] == [str(op.annotation) for op in made.ops]
    assert [t.shape for t in again.inputs] == [t.shape for t in made.inputs]


# --- reports ------------------------------------------------------------------------------------


def row(**speeds: float) -> dict[str, Any]:
    """A row of a report; 0 is a system that does not fit."""
    blank = Outcome("", Way(1), 4, 8)
    systems = {}
    for name, speed in speeds.items():
        fitting = replace(
            blank, system=name, samples_per_sec=speed, secs=1.0, peak_bytes={"weights": 1 << 30},
            shares={"compute": 0.5, "communication": 0.25, "bubble": 0.25},
        )  # fmt: skip
        problem = replace(blank, system=name, problem="needs 99 GiB")
        systems[name] = [problem.to_json(), *([fitting.to_json()] if speed else [])]
    return {"gpus": 4, "model": "L2", "systems": json.loads(json.dumps(systems))}


@pytest.mark.parametrize(
    "speeds, expected",
    [
        ({"a": 2.0, "b": 4.0, "ours": 6.0}, 1.5),
        ({"a": 2.0, "b": 0.0, "ours": 1.0}, 0.5),
        ({"a": 0.0, "b": 0.0, "ours": 6.0}, None),
        ({"a": 1.0, "b": 0.0, "ours": 0.0}, None),
    ],
)
def test_a_speed_up_is_over_the_best_of_the_others(
    speeds: Mapping[str, float], expected: float | None
) -> None:
    assert report.speed_up(row(**speeds), ["ours"]) == expected


def test_tables_fit_the_page_and_say_what_does_not_fit() -> None:
    rows = [row(Megatron=2.0, DeepSpeed=0.0, ours=6.0)]
    text = f"{report.table(rows, ['ours'])}\n{report.ways_table(rows)}"
    assert "does not fit" in text
    assert "3.00 x" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_case_of_one_writer_gains_most_from_rvd() -> None:
    """Point-to-point sends every replica over the slow link, RVD one of them."""
    cases = {(c["category"], c["relation"], c["size"]): c["secs"] for c in transfers.cases()}
    assert len({key[:2] for key in cases if key[1] != "in group"}) == 18
    assert all(
        secs["rvd"] <= 1.01 * secs["p2p"] for (*_, size), secs in cases.items() if size == "64 MiB"
    )
    large = cases["R->R", "n->2n", "64 MiB"]
    assert large["p2p"] > 4 * large["rvd"]


def test_the_command_refuses_other_numbers_of_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["swin", "--gpus", "5", "--out", str(tmp_path)])
    assert "(4, 8, 16, 32) GPUs" in capsys.readouterr().err
