"""The HiDup benchmark: the published table and formula, and the compared systems as planners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rvdcomm as rv
from bench.cells.searches import over
from bench.cells.workload import captured
from bench.hidup import command as hidup
from bench.hidup.command import HIDUP, PUBLISHED, jobs_of, lines
from bench.hidup.models import SYSTEMS, tuned, workload
from superscaler_core.cost import PROFILES
from superscaler_core.evaluation import Candidate, Request, Trial


@pytest.mark.parametrize(
    "cluster, overlap", [("1x4", 0.9192), ("2x4-100gbps", 0.4110), ("2x4-30gbps", 0.2635)]
)
def test_overlap_equals_the_published_values_of_hidup(cluster: str, overlap: float) -> None:
    assert hidup.overlap(*PUBLISHED[cluster]["HiDup"]) == pytest.approx(overlap, abs=1e-3)
    assert hidup.overlap(*PUBLISHED[cluster]["DeepSpeed"]) == 0


@pytest.mark.parametrize("system, num_forms", [("DDP", 1), ("DeepSpeed-MoE", 2)])
def test_systems_halve_microbatches_where_memory_is_short(system: str, num_forms: int) -> None:
    host = rv.Topology.single_host(4, 5e-6, 20e9)
    trained = workload("tiny-bert-switch", 4)
    request = Request(
        lambda samples: captured(trained, samples), (8, 16, 32), 32, range(4), host,
        PROFILES["v100"], 1 << 30,
    )  # fmt: skip

    def all_after(candidate: Candidate) -> Iterator[Candidate]:
        yield candidate
        for follower in candidate.follow(Trial(candidate, peak_bytes=1, problem="memory")):
            yield from all_after(follower)

    roots = list(tuned(SYSTEMS[system])(request))
    assert len(roots) == num_forms
    assert [each.samples for each in all_after(roots[0])] == [32, 16, 8, 4]
    assert not list(roots[0].follow(Trial(roots[0], 1.0, 1)))
    plan = next(c for c in all_after(roots[-1]) if c.samples == 8).plan(request)
    assert plan.num_microbatches == 4


def row(planner: str, secs: float, **more: Any) -> dict[str, Any]:
    return {
        "cell": "2x4-30gbps bert-sgmoe", "gpus": 8, "planner": planner, "secs": secs,
        "compute_secs": 0.3, "comm_secs": 0.2, "peak_bytes": 1 << 30, **more,
    }  # fmt: skip


ROWS = [row(HIDUP, 0.4, predicted_secs=0.38), row("DDP", 0.6), row("FastMoE", 0.5)]


def test_breakdown_lists_the_published_lines_first() -> None:
    head, *published, ours, _, _ = lines("2x4-30gbps", ROWS)
    assert [each[1] for each in published] == ["HiDup", "DeepSpeed", "FastMoE"]
    assert published[0][2:7] == ["0.6657", "0.7453", "0.3021", "0.4432", "26.3%"]
    assert ours[1:8] == [HIDUP, "0.4000", "0.5000", "0.3000", "0.2000", "50.0%", "0.3800"]
    assert {len(each) for each in lines("2x4-30gbps", ROWS)} == {len(head)}


def test_steps_are_divided_by_the_step_of_one_planner() -> None:
    assert over([*ROWS, {**ROWS[1], "cell": "alone"}], HIDUP) == {
        ROWS[0]["cell"]: {"DDP": pytest.approx(1.5), "FastMoE": pytest.approx(1.25)}
    }


def test_hidup_with_published_prices_runs_only_on_the_profiled_cluster() -> None:
    own = [job.cell for job in jobs_of(["1x4", "8x8-10gbps"], ["vit-switch"])]
    assert own == ["1x4 vit-switch"] * 5 + ["8x8-10gbps vit-switch"] * 6
    planners = {job.planner for job in jobs_of(["1x4"], ["vit-switch"])}
    assert planners == {HIDUP, *SYSTEMS}
