"""What schedules raise."""

from __future__ import annotations


class ScheduleError(ValueError):
    """The caller's schedule, or what was asked of one, is wrong."""


def require_counts(what: str, **counts: int) -> None:
    """Refuse counts below 1: a schedule has at least one of everything.

    Raises:
        ScheduleError: one of ``counts`` is not an integer of at least 1; the text names it.
    """
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ScheduleError(f"{what}: {name} is an integer of at least 1, got {count!r}.")
