"""Ticks: the port model in whole numbers. Sums are exact, so equal costs compare equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, inf, lcm

from rvdcomm.cost.ports import PortTimes
from rvdcomm.network import Topology

MAX_EXACT_BITS = 72
"""If the common denominator has more bits, figures are rounded, so that costs fit in 128 bits."""

BITS_OF_A_BYTE = 30
"""A rounded figure of a link keeps at least this many bits: its error is below a billionth."""


@dataclass(frozen=True)
class PortTicks(PortTimes[int]):
    """The port model in ticks; one second has ``a_sec`` ticks.

    Bytes are counted in units of ``1 / parts`` of a byte, so that a search can use fractions of a
    byte. ``a_unit[level]`` are the ticks that one unit takes.
    """

    a_unit: Sequence[int]
    a_sec: int

    @classmethod
    def of(cls, topology: Topology, parts: int = 1) -> PortTicks:
        """The ports of a topology."""
        a_sec, a_byte, a_round = _link_ticks(topology)
        return cls([parts * ticks for ticks in a_round], a_byte, parts * a_sec)

    def busy(self, port_bytes: Sequence[int]) -> list[int]:
        """How long the busiest port of every level takes for its units of bytes."""
        return [units * ticks for units, ticks in zip(port_bytes, self.a_unit, strict=True)]


@lru_cache(maxsize=64)
def _link_ticks(topology: Topology) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Ticks per second, and at every level ticks per byte and per round.

    The figures of a link are read as the decimals that Python prints for them. Decimals of few
    digits have a small common denominator and are exact.
    """
    links = [level.link for level in topology.levels]
    secs_a_byte = [_inverse(link.bytes_per_sec) for link in links]
    alphas = [Fraction(repr(float(secs))) for secs in topology.latencies]
    common = lcm(*(f.denominator for f in (*secs_a_byte, *alphas)))
    if common.bit_length() > MAX_EXACT_BITS:
        quickest = min((f for f in (*secs_a_byte, *alphas) if f), default=Fraction(1))
        common = ceil(2**BITS_OF_A_BYTE / quickest)
    ticks = [[round(f * common) for f in figures] for figures in (secs_a_byte, alphas)]
    return common, tuple(ticks[0]), tuple(ticks[1])


def _inverse(bytes_per_sec: float) -> Fraction:
    if bytes_per_sec == inf:
        return Fraction(0)
    return 1 / Fraction(repr(float(bytes_per_sec)))
