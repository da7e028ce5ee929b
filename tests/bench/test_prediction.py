"""Laws of the comparison of predicted and measured times: its errors, its table and its plot."""

from __future__ import annotations

from typing import Any

import pytest

from bench import prediction
from bench.rvd.cases import IN_GROUP


def row(error: float, size: str = "1 MiB", relation: str = "n->n", category: str = "V->R") -> Any:
    return {
        "category": category,
        "relation": relation,
        "size": size,
        "steps": ["reduce_scatter", "transfer"],
        "predicted_secs": 2e-3 * (1 + error),
        "measured_secs": 2e-3,
        "error": error,
    }


RESULT = {
    "title": "Predicted and measured: a test",
    "rows": [
        row(0.1),
        row(-0.3, category="D->R"),
        row(0.2, category="D->D'"),
        row(-0.02, size="16 MiB"),
        row(0.9, relation=IN_GROUP),
    ],
}


def test_error_is_relative_to_the_median_of_the_measured_times() -> None:
    measured = {**row(0), "src": "a", "dst": "b", "cost_secs": 3e-3}
    measured["samples"] = {"ours": [1e-3, 2e-3, 9e-3], "dist": [7.0]}
    found = prediction._compared(measured, "ours")
    assert (found["measured_secs"], found["predicted_secs"]) == (2e-3, 3e-3)
    assert found["error"] == pytest.approx(0.5)
    assert found["samples"] == [1e-3, 2e-3, 9e-3]


def test_summary_separates_cases_by_group_relation_and_size() -> None:
    assert prediction.summary(RESULT) == (
        "between groups: median error 15.0% (1 MiB 20.0%, 16 MiB 2.0%); at most 30%\n"
        "in one group: median error 90.0% (1 MiB 90.0%); at most 90%\n"
        "all cases: median error 20.0% (1 MiB 25.0%, 16 MiB 2.0%); at most 90%"
    )


def test_unavailable_cluster_ends_the_command_with_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(args: object) -> None:
        raise prediction.ClusterUnavailableError("no root")

    monkeypatch.setattr(prediction, "_run", refuse)
    assert prediction.main([]) == 2
    assert "prediction: no root" in capsys.readouterr().err
