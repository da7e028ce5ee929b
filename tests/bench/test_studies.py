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
from bench.studies.study import STUDIES
from bench.studies.systems import DEEPSPEED, MEGATRON, System, Way, coshard, grids, zero3
from bench.studies.tuning import Outcome, Workload, best, compiled, outcomes
from superscaler_core.plans import PLANS

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
    monkeypatch.setattr(tuning, "FEW", 8)
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


def system_of(*ways: Way, sprogram: Any = PLANS["hybrid"]) -> System:
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


def test_memory_is_saved_only_where_nothing_fits_without(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(1, {"tp": 1, "pp": 1})
    need = []
    for saving in way.savings:
        chosen = replace(way, knobs={**way.knobs, **saving})
        (memory,) = compiled(TINY, 1, PLANS["hybrid"], chosen, 1).memory.values()
        need.append(memory.total_bytes)
    plain, recompute, rerun = need
    least, most = sorted((recompute, rerun))
    assert most < plain
    monkeypatch.setattr(cluster, "limit_bytes", lambda: most)
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    monkeypatch.setattr(tuning, "FEW", 8)
    found = list(outcomes(TINY, 1, system_of(way)))
    assert [(o.way, bool(o.problem)) for o in found] == [("dp=1", True), ("dp=1 recompute", False)]
    monkeypatch.setattr(cluster, "limit_bytes", lambda: least - 1)
    assert [(o.way, bool(o.problem)) for o in outcomes(TINY, 1, system_of(way))] == [
        ("dp=1 rerun", True)
    ]


def test_an_estimate_is_near_what_is_simulated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MICROBATCHES", (1,))
    workload = replace(TINY, batch=64)
    way = Way(1, {"tp": 1, "pp": 2}, savings=({},))
    *estimates, full = outcomes(workload, 2, system_of(way))
    assert not full.is_estimate
    assert best([*estimates, full]) == full
    (same,) = (o for o in estimates if o.is_estimate and o.microbatch == full.microbatch)
    assert same.num_microbatches == full.num_microbatches > 8
    assert same.secs == pytest.approx(full.secs, rel=0.01)
    assert same.peak_bytes == full.peak_bytes


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


def test_offloading_leaves_the_gpu_less_to_hold() -> None:
    peaks = [
        next(iter(compiled(TINY, 2, zero3, Way(2, {"offload": o}), 2).memory.values())).total_bytes
        for o in (False, True)
    ]
    assert peaks[1] < peaks[0]


# --- reports ------------------------------------------------------------------------------------


def row(**speeds: float) -> dict[str, Any]:
    """A row of a report; 0 is a system that does not fit."""
    blank = Outcome("", "dp=1", 1, {}, 4, 8)
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
