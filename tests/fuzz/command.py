"""Command: the common parts of all fuzzers (arguments, progress, findings, and a summary)."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

MAX_SHOWN = 20


@dataclass
class Report:
    """The counts and findings of a run."""

    what: str
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def secs(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def print(self) -> int:
        """Print a summary; returns the exit status, 1 if there are findings."""
        print(f"{self.what}: {self.secs:.1f} s, {len(self.findings)} findings")
        for name, count in sorted(self.counts.items()):
            print(f"  {count:>9,} {name}")
        for finding in self.findings[:MAX_SHOWN]:
            print(f"FINDING {finding}")
        if len(self.findings) > MAX_SHOWN:
            print(f"... and {len(self.findings) - MAX_SHOWN} more")
        return 1 if self.findings else 0


def parser(
    module: str, summary: str, examples: str, *, has_seed: bool = True
) -> argparse.ArgumentParser:
    """A parser with examples in its help and, if anything is random, with the option ``--seed``."""
    made = argparse.ArgumentParser(
        prog=f"python -m tests.fuzz.{module}",
        description=summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if has_seed:
        made.add_argument("--seed", type=int, default=0, help="seed of all cases (default 0)")
    return made


def progress(items: Sequence[int] | range, unit: str) -> Iterable[int]:
    """The items, with a progress bar on a terminal."""
    return tqdm(items, unit=unit, disable=None, leave=False)


def guarded(check: Callable[[], list[str]]) -> list[str]:
    """The findings of a check; an unexpected error is a finding, too."""
    try:
        return check()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
