"""Command: one sub-command of the command line, as a value."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import rvdcomm as rv
from superscaler_core.errors import AnnotationError, CaptureError, PlanError
from superscaler_core.schedules import ScheduleError

OK, NOT_VALID, BAD_REQUEST, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""


@dataclass(frozen=True)
class Command:
    """One sub-command: ``run`` takes the parsed arguments and returns the exit status."""

    summary: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class UsageError(ValueError):
    """The command line asks for something that does not exist."""


USER_ERRORS = (
    *(UsageError, AnnotationError, CaptureError, PlanError, ScheduleError),
    *(rv.LayoutError, rv.MemoryLimitError, rv.CommError),
)
"""Errors that are printed in one line, without a traceback."""
