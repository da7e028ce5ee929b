"""Captured: the captured graphs of a model, one for each microbatch size, and their cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from superscaler_core.graph.graph import Graph

GraphOf = Callable[[int], Graph]
"""From the number of samples of a microbatch to the model's graph with this microbatch."""


class Captured:
    """Captures a graph when a size is first asked for, keeps it, and measures the time.

    Args:
        capture: captures a graph of any size.
        first: sizes that are captured in any case, because the graphs of others are made of them.
        secs: seconds that capturing takes, if that is known.

    Attributes:
        secs: seconds of the longest capture so far.
    """

    def __init__(self, capture: GraphOf, first: Sequence[int] = (), secs: float = 0.0) -> None:
        self._capture, self._first = capture, tuple(first)
        self._made: dict[int, Graph] = {}
        self.secs = secs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    @property
    def sizes(self) -> Collection[int]:
        """The sizes that have been captured by this process."""
        return self._made.keys()

    def __call__(self, samples: int) -> Graph:
        """The model with a microbatch of so many samples."""
        if samples not in self._made:
            start = time.monotonic()
            self._made[samples] = self._capture(samples)
            self.secs = max(self.secs, time.monotonic() - start)
        return self._made[samples]

    def begin(self, worker: int = 0) -> None:
        """Capture the first sizes; other processes that do so too begin with others.

        Args:
            worker: number of this process.
        """
        start = worker % max(1, len(self._first))
        for samples in (*self._first[start:], *self._first[:start]):
            self(samples)
