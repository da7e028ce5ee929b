"""Laws of the command line of ``bench.weights``."""

from __future__ import annotations

import pytest

from bench.weights.command import parse_args, table

ROW = {
    "direction": "there",
    "samples": {"many": [0.5, 0.25, 0.75], "each": [1.0]},
    "limit_secs": 0.0,
    "peak_bytes": [1 << 20],
    "model_bytes": 1 << 30,
    "largest_shards_bytes": 1 << 20,
}


def test_methods_are_compared_with_the_method_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert "each 1000.0 ms (2.00x)" in table({"title": "here", "rows": [ROW]})
    with pytest.raises(SystemExit):
        parse_args(["--methods", "each,gather"])
    assert "--methods each,gather: the others are compared with many; add it." in (
        capsys.readouterr().err
    )
