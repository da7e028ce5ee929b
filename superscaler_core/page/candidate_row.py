"""Candidate row: what a page shows of one candidate of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CANDIDATES = 500
"""Most candidates that a page shows: first those that fit, the fastest first."""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One candidate.

    Attributes:
        name: the options of the plan.
        secs: predicted seconds of a step; None if the plan is not possible.
        peak_bytes: bytes on the fullest device; 0 if unknown.
        why: why it was refused; empty if it fits.
        is_chosen: whether the search chose it.
        is_estimate: whether only a part of its step was simulated.
    """

    name: str
    secs: float | None
    peak_bytes: int
    why: str = ""
    is_chosen: bool = False
    is_estimate: bool = False

    @property
    def fits(self) -> bool:
        """Whether the plan is possible and fits in memory."""
        return not self.why

    @property
    def value(self) -> dict[str, Any]:
        """The candidate for JSON."""
        return {
            "name": self.name, "secs": self.secs, "bytes": self.peak_bytes, "fits": self.fits,
            "why": self.why, "chosen": self.is_chosen, "estimate": self.is_estimate,
        }  # fmt: skip

    @classmethod
    def of_value(cls, value: Mapping[str, Any]) -> CandidateRow:
        """The candidate of a value.

        Raises:
            KeyError: the value lacks an entry.
        """
        return cls(
            value["name"], value["secs"], value["bytes"], value["why"],
            is_chosen=value["chosen"], is_estimate=value["estimate"],
        )  # fmt: skip


def shown(candidates: Iterable[CandidateRow]) -> Sequence[CandidateRow]:
    """The candidates of a page, in its order: the chosen one, those that fit, those refused."""

    def order(row: CandidateRow) -> tuple[bool, bool, float, int]:
        secs = float("inf") if row.secs is None else row.secs
        return not row.is_chosen, not row.fits, secs, row.peak_bytes

    return sorted(candidates, key=order)[:MAX_CANDIDATES]
