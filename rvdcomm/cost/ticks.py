"""Ticks: the port model in whole numbers. Sums are exact in any order, so equal costs tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, inf, lcm

from rvdcomm.cost.ports import PortTimes
from rvdcomm.layout import Topology

MAX_EXACT_BITS = 72
"""Denominators above this are rounded, so that costs fit in 128 bits."""

BITS_OF_A_BYTE = 30
"""Bits that a rounded figure of a link keeps at least: its error is below a billionth."""


@dataclass(frozen=True)
class PortTicks(PortTimes[int]):
    """Ports in ticks; ``a_sec`` ticks are a second.

    Bytes are counted in units of ``1 / parts`` of a byte, where a search needs such fractions.
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
    """Ticks of a second, and of a byte and of a round at every level.

    A link's figures are taken as the decimals that they print as. Decimals of few digits have a
    small common denominator and are exact.
    """
    links = [level.link for level in topology.levels]
    secs_a_byte = [_inverse(link.bytes_per_sec) for link in links]
    alphas = [Fraction(repr(float(link.alpha_secs))) for link in links]
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
