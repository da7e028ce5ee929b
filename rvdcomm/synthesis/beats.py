"""Beats: how long trees take whose slices follow each other, one beat apart.

In each beat all hops whose turn it is run at once; a beat takes as long as its busiest wire, and
the latency of its rounds: the messages of the rank that has most.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from rvdcomm.synthesis.forest import Forest, Pair

NUM_SLICES = (1, 2, 4, 8, 16, 32, 64, 128)
"""The numbers of slices to choose from."""

MAX_MESSAGES = 1 << 16
"""The most messages of all slices and trees: lowering them for all ranks takes seconds."""


def beats_of(forest: Forest) -> Beats:
    """The beats of a forest; those of its pattern are computed once for all sizes."""
    return Beats(_pattern_of(forest.pattern or forest), forest.unit)


def beats_in_full(forest: Forest) -> Beats:
    """The same by the sizes of the forest itself, which are not rounded."""
    return Beats(Pattern(forest))


@lru_cache(maxsize=256)
def _pattern_of(forest: Forest) -> Pattern:
    return Pattern(forest)


@dataclass(frozen=True)
class Beats:
    """When the hops of a forest run, and how long they take.

    Attributes:
        pattern: its hops by beats, for demands of fewest elements.
        unit: the elements of a demand for each that the pattern has.
    """

    pattern: Pattern
    unit: float = 1.0

    @property
    def num_hops(self) -> int:
        """Messages, if there is one slice and each demand is one box."""
        return self.pattern.num_hops

    def secs(self, num_slices: int, item_bytes: int) -> float:
        """Seconds of all beats, with their latencies."""
        busy, latency = self.pattern.secs(num_slices)
        return busy * (item_bytes * self.unit) + latency

    def best_num_slices(self, item_bytes: int, most: int = NUM_SLICES[-1]) -> int:
        """The number of slices with the least time; the smallest of equally good numbers."""
        most = min(most, MAX_MESSAGES // max(1, self.num_hops))
        counts = [n for n in NUM_SLICES if n <= most] or [1]
        return min(counts, key=lambda count: (self.secs(count, item_bytes), count))


@dataclass(frozen=True)
class Pattern:
    """The hops of a forest by the beat in which their first slice starts."""

    forest: Forest

    @cached_property
    def _known(self) -> dict[int, tuple[float, float]]:
        return {}

    def secs(self, num_slices: int) -> tuple[float, float]:
        """Seconds of all beats: without latencies, if an element is a byte; and latencies alone."""
        if num_slices not in self._known:
            busy = latency = 0.0
            for active, count in self._active(num_slices).items():
                own = list(active)
                busy += count * float(self._secs[own].sum(axis=0).max(initial=0.0)) / num_slices
                latency += count * self._latency_secs(own)
            self._known[num_slices] = busy, latency
        return self._known[num_slices]

    @cached_property
    def _hops(self) -> list[tuple[int, Pair, tuple[int, ...], float, float]]:
        """(beat, ranks, wires, elements, latency) of each hop of each way."""
        forest = self.forest
        return [
            (
                beats[hop.src, hop.dst],
                (hop.src, hop.dst),
                hop.wires,
                float(share) * demand.num_elements,
                forest.alpha_secs(hop),
            )
            for demand, ways in zip(forest.demands, forest.ways, strict=True)
            for way, share in ways
            for tree in way
            for hops, beats in zip((tree.sums, tree.copies), forest.beats(tree), strict=True)
            for hop in hops
        ]

    @property
    def num_hops(self) -> int:
        """Messages, if there is one slice and each demand is one box."""
        return len(self._hops)

    @cached_property
    def _secs(self) -> NDArray[np.float64]:
        """[beats, wires]: how long all hops that start in a beat keep each wire busy.

        A byte an element, latencies aside.
        """
        rates = np.array([wire.link.bytes_per_sec for wire in self.forest.wires])
        found = np.zeros((self.forest.num_beats, len(rates)))
        for beat, _, wires, num_elements, _ in self._hops:
            found[beat, list(wires)] += num_elements
        secs: NDArray[np.float64] = found / rates
        return secs

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """[beats, ranks, ranks]: hops that start in a beat; [ranks, ranks]: latencies of hops."""
        number = {
            rank: i for i, rank in enumerate(sorted({r for _, p, *_ in self._hops for r in p}))
        }
        counts = np.zeros((self.forest.num_beats, len(number), len(number)), dtype=np.int64)
        alphas = np.zeros(counts.shape[1:])
        for beat, (a, b), _, _, alpha in self._hops:
            place = number[a], number[b]
            counts[(beat, *place)] += 1
            alphas[place] = alpha
        return counts, alphas

    def _active(self, num_slices: int) -> Counter[tuple[int, ...]]:
        """Which beats of the first slice are active at once, with those of later slices shifted to
        them, and for how many beats.
        """
        turns, num_beats = self.forest.num_turns, self.forest.num_beats
        return Counter(
            tuple(
                own
                for own in range(beat % turns, min(beat + 1, num_beats), turns)
                if (beat - own) // turns < num_slices
            )
            for beat in range(self.forest.num_beats_in(num_slices))
        )

    def _latency_secs(self, own: list[int]) -> float:
        """The rounds of the rank that sends to most, or receives from most, times the latency."""
        counts, alphas = self._pairs
        is_used = counts[own].any(axis=0)
        rounds = max(is_used.sum(axis=0).max(initial=0), is_used.sum(axis=1).max(initial=0))
        return float(rounds) * float(alphas[is_used].max(initial=0.0))
