"""Simulated: the result of a simulation, for people and for files."""

from __future__ import annotations

from pathlib import Path

from superscaler_core.simulator.account import Account
from superscaler_core.simulator.picture import draw
from superscaler_core.simulator.text import summary_of, text_of
from superscaler_core.simulator.trace import save_trace


class Simulated(Account):
    """One simulated training step; print it. Its figures are those of ``Account``."""

    def __str__(self) -> str:
        return text_of(self)

    def summary(self) -> str:
        """Time, bubble and peak memory, in a few lines."""
        return summary_of(self)

    def save_trace(self, path: str | Path) -> None:
        """Write the step in Chrome's trace format, for chrome://tracing and Perfetto."""
        save_trace(self, path)

    def draw(self, path: str | Path) -> None:
        """Write a picture: devices over time, and their memory below.

        Raises:
            PlanError: matplotlib is missing, or cannot write this suffix.
        """
        draw(self, path)
