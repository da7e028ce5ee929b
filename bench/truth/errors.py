"""Errors: predicted beside measured steps, and the step of the row that a prediction chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from bench.truth.rows import Row, groups


def summary(of: Sequence[Row], predicted: Sequence[float]) -> dict[str, Any]:
    """Relative errors over rows, and ratios of choices over groups of two rows or more."""
    errors = [secs / row.secs - 1 for row, secs in zip(of, predicted, strict=True)]
    by_row = dict(zip(of, predicted, strict=True))
    chosen = ratios(of, lambda mine: min(mine, key=by_row.__getitem__))
    by_rule = ratios(of, largest_data_parallel)
    return {
        "num_rows": len(of),
        "mean_absolute_error": fmean(map(abs, errors)),
        "median_absolute_error": median(map(abs, errors)),
        "largest_absolute_error": max(map(abs, errors)),
        "bias": fmean(errors),
        "groups": len(chosen),
        "chosen_over_fastest": fmean(chosen) if chosen else None,
        "largest_chosen_over_fastest": max(chosen, default=None),
        "rule_over_fastest": fmean(by_rule) if by_rule else None,
    }


def ratios(of: Sequence[Row], choose: Callable[[Sequence[Row]], Row]) -> list[float]:
    """For each group, the measured step of the chosen row over that of the fastest."""
    several = (mine for mine in groups(of).values() if len(mine) > 1)
    return [choose(mine).secs / min(row.secs for row in mine) for mine in several]


def largest_data_parallel(of: Sequence[Row]) -> Row:
    """The trivial rule: the most data parallelism, then the largest microbatch."""
    return max(of, key=lambda row: (row.dp, row.micro))
