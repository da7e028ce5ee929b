"""Trail: the last instructions that one rank began, by the names of its plan."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_MARKS = 64
"""A trail keeps so many instructions: enough to see the pass of a stage in which a rank waits."""

MAX_NAMES = 2
"""A text names so many weights of an instruction; the names of an FSDP unit may fill pages."""


class Mark(NamedTuple):
    """An instruction that a rank began.

    Attributes:
        words: what it does, such as ``start reduce``.
        given: what it does it to: the name of an edge, a segment or weights, and the microbatch.
        since_ns: when it began, in nanoseconds of ``time.time_ns``.
    """

    words: str
    given: tuple[Any, ...]
    since_ns: int

    @property
    def text(self) -> str:
        """The instruction as a text; ranges of torch's profiler have this name.

        >>> Mark("forward", ("stage0_segment1", 2), 0).text
        'forward stage0_segment1 mb 2'
        >>> Mark("unshard", (("up.weight", "up.bias", "down.weight"),), 0).text
        'unshard up.weight, up.bias, 1 more'
        """
        return " ".join([self.words, *map(_text, self.given)])


def _text(given: Any) -> str:
    if isinstance(given, int):
        return f"mb {given}"
    if isinstance(given, str):
        return given
    if callable(given):
        return str(given.__name__)
    names = [str(name) for name in given]
    more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return ", ".join([*names[:MAX_NAMES], *more])


class Trail:
    """The last instructions of a rank's present step, and how many there were.

    Noting one costs a few hundred nanoseconds, so that it is always done: after a hang it is too
    late to begin. It holds names and numbers, no tensors.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[str, tuple[Any, ...], int]] = deque(maxlen=MAX_MARKS)
        self.num = 0

    def restart(self) -> None:
        """A step begins."""
        self._marks.clear()
        self.num = 0

    def note(self, words: str, given: tuple[Any, ...]) -> None:
        """An instruction begins."""
        self.num += 1
        self._marks.append((words, given, time.time_ns()))

    def __iter__(self) -> Iterator[Mark]:
        # A copy: the rank's own thread may note more while another one reads.
        return (Mark(*mark) for mark in self._marks.copy())

    @property
    def last(self) -> Mark | None:
        """The instruction that began last; None before the first one."""
        return Mark(*self._marks[-1]) if self._marks else None

    @property
    def position(self) -> str:
        """Where the rank is in its step, as errors say it; empty before the first instruction."""
        marks = list(self)
        if not marks:
            return ""
        last = marks[-1]
        found = f"instruction {self.num}: {last.text}"
        if any(isinstance(each, int) for each in last.given):
            return found
        # Communication inside a stage does not say for which microbatch it is done.
        near = next((mark for mark in reversed(marks) if callable((*mark.given, None)[0])), None)
        return found if near is None else f"{found}, after {near.text}"
