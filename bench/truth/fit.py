"""Fit: the constants of the host and of the memory, from the first rows of the single-node file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from tqdm import tqdm

from bench.truth.reading import Constants, Programs, Reading, topology_of
from bench.truth.rows import Row
from superscaler_core.cost import Collective
from superscaler_core.simulator import simulate

STEPS: Mapping[str, float] = {"issue_us": 4.0, "action_ms": 0.5, "memory": 0.05, "call8_us": 50.0}
"""First step of each constant; steps are halved when none of them improves the fit."""

HALVINGS = 3


def fitted(of: Sequence[Row], reading: Reading, start: Constants) -> tuple[Constants, float]:
    """The constants with the least mean absolute error, one coordinate after another."""
    programs = Programs(reading, of)
    bar = tqdm(of, desc="compile rows", delay=2, leave=False, disable=None)
    compiled = [programs.compiled(row) for row in bar]

    def error(constants: Constants) -> float:
        profile = constants.profile()
        pairs = zip(of, compiled, strict=True)
        steps = ((row, simulate(one, profile, topology_of(row.gpus)).secs) for row, one in pairs)
        return fmean(abs(secs / row.secs - 1) for row, secs in steps)

    best, least, scale = start, error(start), 1.0
    for _ in range(HALVINGS):
        while True:
            tried = {other: error(other) for other in tqdm([*_near(best, scale)], leave=False)}
            other = min(tried, key=tried.__getitem__)
            if tried[other] >= least:
                break
            best, least = other, tried[other]
            print(f"{least:.4f}  {best}", flush=True)
        scale /= 2
    return best, least


def _near(of: Constants, scale: float) -> Iterator[Constants]:
    for name, step in STEPS.items():
        for sign in (1, -1):
            value = round(getattr(of, name) + sign * scale * step, 6)
            if value > 0 and not (name == "memory" and value > 1):
                yield replace(of, **{name: value})


def collective(num: int, times: Sequence[tuple[int, float]]) -> tuple[Collective, float]:
    """Least squares of the relative errors of an all-reduce's times; their median error."""
    sizes, secs = (np.array(column, dtype=float) for column in zip(*times, strict=True))
    moved = 2 * (num - 1) / num * sizes
    lines = np.stack([1 / secs, moved / secs], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(lines, np.ones(len(secs)), rcond=None)
    errors = np.abs((latency + slope * moved) / secs - 1)
    return Collective(float(latency), float(1 / slope)), float(np.median(errors))
