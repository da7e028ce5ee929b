"""Slices: TeraPipe's cut of a batch of sequences into slices, by dynamic programming.

If slice i takes t_i seconds at every stage, n slices pass a pipeline of K stages in

    T = sum of t_i + (K - 1) * max of t_i

A slice of b sequences and s tokens, behind c tokens, takes ``latency(b, s, c)``. The values t_max
of this latency are tried in ascending order. The best cut whose slices take at most t_max is

    f[b, n] = min over s of f[b, n - s] + latency(b, s, n - s)      of the first n tokens
    g[B] = min over b of g[B - b] + f[b, L]                         of B sequences of L tokens

The least ``g[B] + (K - 1) * t_max`` over all t_max is the optimum. The loop ends at the first t_max
whose ``(K - 1) * t_max`` alone is not below the best T so far, because no later t_max can improve
it. Complexity: ``O(B L**2)`` for each of at most ``B L**2 / 2`` values of t_max, with L counted in
units of ``grain`` tokens.

Difference from the published code (``latency_model.py``): that code skips values of t_max that are
close to each other; this module tries all.

Source: Li et al., TeraPipe, ICML 2021, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

Latency = Callable[[int, int, int], float]
"""From a slice's sequences, its tokens, and the tokens before it to its seconds at a stage."""


@dataclass(frozen=True, slots=True)
class SliceCut:
    """A cut of a batch into groups of sequences, and of each group into slices.

    Attributes:
        secs: seconds of the pipeline; in partial results, the sum of the slices' latencies.
        groups: for each group, its number of sequences and the tokens of each slice.
    """

    secs: float
    groups: tuple[tuple[int, tuple[int, ...]], ...]


def pipeline_secs(slice_secs: Sequence[float], num_stages: int) -> float:
    """Time of slices in a pipeline of equal stages, from their times at one stage.

    >>> pipeline_secs([4, 3, 2, 1], 4), pipeline_secs([2] * 5, 4)
    (22, 16)
    """
    return sum(slice_secs) + (num_stages - 1) * max(slice_secs)


def cut_slices(
    latency: Latency, num_stages: int, batch: int, length: int, grain: int = 1
) -> SliceCut:
    """The cut with the least time of the whole pipeline.

    Args:
        latency: seconds of a slice at a stage, above 0.
        num_stages: number of stages K.
        batch: number of sequences B.
        length: length L of each sequence, in tokens.
        grain: lengths of slices are multiples of this many tokens; divides ``length``.

    Raises:
        ValueError: a count is below 1, or ``grain`` does not divide ``length``.
    """
    if min(num_stages, batch, length, grain) < 1 or length % grain:
        raise ValueError(
            f"slices of {length} tokens of {batch} sequences for {num_stages} stages: all are at "
            f"least 1, and the grain of {grain} tokens has to divide the length."
        )
    known = cache(latency)
    ends = range(grain, length + 1, grain)
    sizes = range(1, batch + 1)
    maxima = sorted(
        {known(b, s, c) for b in sizes for s in ends for c in range(0, length - s + 1, grain)}
    )
    best = SliceCut(inf, ())
    for most in maxima:
        if (num_stages - 1) * most >= best.secs:
            break
        found = _within(known, most, batch, length, grain)
        if found is not None:
            secs = found.secs + (num_stages - 1) * most
            best = min(best, SliceCut(secs, found.groups), key=lambda cut: cut.secs)
    return best


def _within(latency: Latency, most: float, batch: int, length: int, grain: int) -> SliceCut | None:
    """The cut with the least sum of latencies, none above ``most``; None if there is none."""
    cuts: dict[int, SliceCut] = {}
    for size in range(1, batch + 1):
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for end in range(grain, length + 1, grain):
            options = [
                (best[start][0] + secs, (*best[start][1], end - start))
                for start in range(0, end, grain)
                if start in best and (secs := latency(size, end - start, start)) <= most
            ]
            if options:
                best[end] = min(options)
        if length in best:
            cuts[size] = SliceCut(best[length][0], ((size, best[length][1]),))
    whole: dict[int, SliceCut] = {0: SliceCut(0.0, ())}
    for total in range(1, batch + 1):
        joined = [
            SliceCut(
                whole[total - size].secs + cut.secs, (*whole[total - size].groups, *cut.groups)
            )
            for size, cut in cuts.items()
            if total - size in whole
        ]
        if joined:
            whole[total] = min(joined, key=lambda cut: cut.secs)
    return whole.get(batch)
