"""Errors of schedules."""

from __future__ import annotations


class ScheduleError(ValueError):
    """The caller's schedule, or a request about one, is wrong."""


def require_counts(what: str, **counts: int) -> None:
    """Check that counts are at least 1, because a schedule has at least one of everything.

    Raises:
        ScheduleError: a count is not an integer of at least 1; the message names it.
    """
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ScheduleError(f"{what}: {name} is an integer of at least 1, got {count!r}.")
