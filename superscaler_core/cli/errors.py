"""Errors: those of users, which are printed in one line, without a traceback."""

from __future__ import annotations

import rvdcomm as rv
from rvdcomm.cli import UsageError
from superscaler_core.errors import AnnotationError, CaptureError, PlanError
from superscaler_core.schedules import ScheduleError

USER_ERRORS = (
    *(UsageError, AnnotationError, CaptureError, PlanError, ScheduleError),
    *(rv.LayoutError, rv.MemoryLimitError, rv.CommError),
)
