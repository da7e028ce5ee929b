"""Frame: the values of one run of a stage for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class Totals:
    """Sums by key; terms are not modified, and no term is kept once it is added."""

    __slots__ = ("_now", "_own")

    def __init__(self) -> None:
        self._now: dict[str, Tensor] = {}
        self._own: set[str] = set()

    def add(self, key: str, term: Tensor) -> None:
        """Add a term to the total of ``key``."""
        now = self._now.get(key)
        if now is None:
            self._now[key] = term
        elif key in self._own:
            now += term
        else:
            # The first sum of two terms is a new tensor, which can be modified in place.
            self._now[key] = now + term
            self._own.add(key)

    def take(self, key: str) -> Tensor | None:
        """The total, which is removed; None if nothing was added."""
        self._own.discard(key)
        return self._now.pop(key, None)

    def clear(self) -> None:
        """Remove all totals."""
        self._now.clear()
        self._own.clear()


@dataclass(slots=True)
class Frame:
    """The values of one run of a stage for one microbatch.

    Attributes:
        mb: the microbatch.
        values: results of segments, and what edges have brought, by ``Value.key``.
        grads, sums: gradients of values, and sums that edges move, added up term by term.
    """

    mb: int
    values: dict[str, Any] = field(default_factory=dict)
    grads: Totals = field(default_factory=Totals)
    sums: Totals = field(default_factory=Totals)
