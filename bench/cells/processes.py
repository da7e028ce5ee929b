"""Processes: work on cells side by side, each piece in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tqdm import tqdm

NUM_PROCESSES = 2
"""Of a search."""

Given = TypeVar("Given")
Found = TypeVar("Found")


def side_by_side(
    do: Callable[[Given], Found], given: Sequence[Given], num_processes: int, desc: str
) -> Iterator[Found]:
    """What a function makes of each of some values, in their order, in which they are begun too.

    Args:
        do: can be sent to another process.
        given: those that take longest, or matter most, first.
        num_processes: at a time.
        desc: of the progress bar.

    Raises:
        BrokenProcessPool: the system has killed a process, for its memory perhaps.
    """
    context = multiprocessing.get_context("spawn")
    # A pool of another kind would wait for ever for a process that was killed.
    with ProcessPoolExecutor(num_processes, context, _start, max_tasks_per_child=1) as pool:
        yield from tqdm(pool.map(do, given), total=len(given), desc=desc, disable=None)


def _start() -> None:
    """Ctrl-C ends a piece of work; a search would take it for the end of its budget."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
