"""Reach: the share of a peak that work reaches, by its amount."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import exp, isfinite, log

from superscaler_core.errors import PlanError

ROUNDING = 1e-9
"""By how much a slope may exceed 1: shares are quotients of measured figures."""


@dataclass(frozen=True)
class Reach:
    """The share of a peak that is reached: small kernels leave most of a device idle.

    The amount is the operations of a product, with its batch, or the bytes of a pass over memory.
    Between two points the share is a power of the amount: a straight line where both axes are
    logarithmic. Below the first point the first line continues if the share falls there, and else
    the share is constant; above the last point it is constant.

    Laws (tests/superscaler_core/cost/test_reach.py): more work never takes less time; where shares
    do not fall, a piece of a k-th of the work takes at least a k-th of its time.

    Attributes:
        points: pairs of an amount and a share, by amount. A share grows at most as the amount
            does, or more work would take less time.

    >>> Reach(((1e6, 0.1), (1e8, 0.4))).at(1e7)
    0.2
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        amounts, shares = self._amounts, [share for _, share in self.points]
        if not (
            self.points
            and all(0 < a < b and isfinite(b) for a, b in pairwise((*amounts, 2 * amounts[-1])))
            and all(0 < share <= 1 for share in shares)
            and all(slope <= 1 + ROUNDING for slope in self._slopes)
        ):
            raise PlanError(
                f"the shares {self.points} cannot be: amounts have to grow, shares are above 0 and "
                "at most 1, and a share grows at most as its amount does."
            )

    def at(self, amount: float) -> float:
        """The share that work of this amount reaches."""
        last, share = self.points[-1]
        if amount >= last or len(self.points) == 1:
            return share
        line = max(1, bisect_right(self._amounts, amount)) - 1
        first, share = self.points[line]
        slope = self._slopes[line]
        power = slope if amount > first else max(0.0, slope)
        return share * exp(power * log(amount / first))

    @property
    def is_rising(self) -> bool:
        """Whether more work never reaches a lower share."""
        return all(s <= t for (_, s), (_, t) in pairwise(self.points))

    def scaled(self, factor: float) -> Reach:
        """All shares times a factor, but at most 1."""
        return Reach(tuple((amount, min(1.0, factor * share)) for amount, share in self.points))

    @classmethod
    def lawful(cls, points: Iterable[tuple[float, float]]) -> Reach:
        """From measured shares, which noise may have moved: one that is too high is lowered."""
        kept: list[tuple[float, float]] = []
        for amount, share in sorted(points):
            most = min(1.0, kept[-1][1] * amount / kept[-1][0]) if kept else 1.0
            kept.append((amount, min(share, most)))
        return cls(tuple(kept))

    @cached_property
    def _amounts(self) -> tuple[float, ...]:
        return tuple(amount for amount, _ in self.points)

    @cached_property
    def _slopes(self) -> tuple[float, ...]:
        return tuple(log(t / s) / log(b / a) for (a, s), (b, t) in pairwise(self.points))


FULL = Reach(((1.0, 1.0),))
"""All of the peak."""
