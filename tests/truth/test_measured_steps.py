"""Predicted steps beside measured ones, on a fixed sample; ``python -m bench.truth`` has all."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from bench.truth.predict import predicted
from bench.truth.reading import READINGS, Constants
from bench.truth.rows import MISSING, NUM_FIT, Row, folder, rows

DATA = folder()
pytestmark = pytest.mark.skipif(DATA is None, reason=MISSING)


def errors(of: Sequence[Row]) -> list[float]:
    pairs = predicted(of, READINGS["as chosen"], Constants(), num_processes=1)
    return [secs / row.secs - 1 for row, (secs, _) in zip(of, pairs, strict=True)]


def test_steps_of_one_node_are_predicted() -> None:
    """Rows to which nothing was fitted; of few models, because capturing them takes time."""
    assert DATA is not None
    others = rows(DATA, "single_node")[NUM_FIT:]
    models = {(1024, 16), (2048, 12)}
    sample = [row for row in others if (row.width, row.layers) in models][::9]
    assert len(sample) >= 18
    found = errors(sample)
    assert fmean(map(abs, found)) < 0.08
    assert abs(fmean(found)) < 0.04


def test_steps_of_several_nodes_are_predicted() -> None:
    assert DATA is not None
    small = [row for row in rows(DATA, "multi_node") if row.gpus == 64 and row.tp in (1, 4)]
    assert len(small) >= 5
    assert fmean(map(abs, errors(small))) < 0.10
