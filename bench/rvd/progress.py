"""Progress on stderr: a bar on a terminal; elsewhere, as in a log, a line every few seconds."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

BAR_SECS, LINE_SECS = 0.2, 3.0
"""Times between two states of the bar, and between two lines, at least."""


@dataclass
class Progress:
    """Shows how many cases are done, and in a log the name of the last one.

    Attributes:
        total: number of all cases.
        is_tty: whether stderr is a terminal.
        clock: returns the time, in seconds.
    """

    total: int
    is_tty: bool = field(default_factory=lambda: sys.stderr.isatty())
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)
    _shown_at: float = field(init=False, default=-inf)
    _num_shown: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def show(self, num_done: int, name: str) -> None:
        """Show that ``num_done`` cases are done, unless something was shown just now."""
        now, wait_secs = self.clock(), BAR_SECS if self.is_tty else LINE_SECS
        is_news = self.is_tty or num_done > self._num_shown
        is_due = now - self._shown_at >= wait_secs or num_done == self.total
        if not is_news or not is_due:
            return
        self._num_shown, self._shown_at = num_done, now
        text = f"{num_done}/{self.total} cases, {now - self._started:.0f} s"
        if self.is_tty:
            bar = "#" * (30 * num_done // self.total)
            print(f"\r[{bar:<30}] {text}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{text}: {name}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar from a terminal."""
        if self.is_tty:
            print("\r" + " " * 70 + "\r", end="", file=sys.stderr, flush=True)


def watch(results: Path, total: int, done: threading.Event) -> None:
    """Show the progress of ranks that append a line per case to ``results``, until ``done``."""
    progress = Progress(total)
    is_over = False
    while not is_over:
        is_over = done.wait(BAR_SECS)
        # The last line may still be incomplete.
        *lines, _ = results.read_text().split("\n")
        progress.show(len(lines), _name(lines[-1]) if lines else "")
    progress.close()


def _name(line: str) -> str:
    row = json.loads(line)
    return f"{row['category']} {row['relation']} {row['size']}"
