"""Predict: simulated steps of rows, by several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from functools import partial

from tqdm import tqdm

from bench.truth.reading import Constants, Programs, Reading, topology_of
from bench.truth.rows import Row
from superscaler_core.simulator import simulate

Prediction = tuple[float, int]
"""Seconds of a step, and the peak memory of the device that needs most."""


def predicted(
    of: Sequence[Row], reading: Reading, constants: Constants, num_processes: int | None = None
) -> list[Prediction]:
    """The simulated step and peak memory of each row."""
    ways = num_processes or min(4, len(os.sched_getaffinity(0)))
    # Rows of one model are consecutive, so that a process captures few models.
    ordered = sorted(range(len(of)), key=lambda i: (of[i].width, of[i].layers, of[i].sequence, i))
    size = 1 + len(of) // (8 * ways)
    chunks = [ordered[i : i + size] for i in range(0, len(of), size)]
    found: dict[int, Prediction] = {}
    with tqdm(total=len(of), desc="predict steps", delay=2, leave=False, disable=None) as bar:
        for chunk, pairs in zip(chunks, _mapped(of, chunks, reading, constants, ways), strict=True):
            found |= dict(zip(chunk, pairs, strict=True))
            bar.update(len(chunk))
    return [found[i] for i in range(len(of))]


def _mapped(
    of: Sequence[Row], chunks: Sequence[Sequence[int]], reading: Reading, constants: Constants,
    ways: int,
) -> Iterator[list[Prediction]]:  # fmt: skip
    work = partial(_of_chunk, reading, constants)
    tasks = [[of[i] for i in chunk] for chunk in chunks]
    if ways == 1 or len(tasks) == 1:
        yield from map(work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(ways) as pool:
        yield from pool.imap(work, tasks)


def _of_chunk(reading: Reading, constants: Constants, of: Sequence[Row]) -> list[Prediction]:
    programs, profile = Programs(reading, of), constants.profile()
    found = []
    for row in of:
        step = simulate(programs.compiled(row), profile, topology_of(row.gpus))
        found.append((step.secs, max(step.peak_bytes.values())))
    return found
