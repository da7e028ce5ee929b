"""Command: one sub-command of the command line, as a value."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

OK, NOT_PROVED, BAD_REQUEST, INTERRUPTED = 0, 1, 2, 130
FAILED = 1
"""Exit statuses."""


@dataclass(frozen=True)
class Command:
    """One sub-command: ``run`` gets the parsed arguments and returns the exit status."""

    summary: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
