"""HiDup's table by its formula, and the systems beside it as planners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rvdcomm as rv
from bench.hidup import PUBLISHED, Row
from bench.hidup_models import SYSTEMS, tuned, workload
from bench.studies.workload import captured
from superscaler_core.cost import PROFILES
from superscaler_core.planners.search.request import Candidate, Request, Trial


@pytest.mark.parametrize(
    "cluster, overlap", [("1x4", 0.9192), ("2x4-100gbps", 0.4110), ("2x4-30gbps", 0.2635)]
)
def test_overlap_is_that_of_hidups_table(cluster: str, overlap: float) -> None:
    assert Row("", *PUBLISHED[cluster]["HiDup"]).overlap == pytest.approx(overlap, abs=1e-3)
    assert Row("", *PUBLISHED[cluster]["DeepSpeed"]).overlap == 0


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
