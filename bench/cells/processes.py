"""Processes: run the work on cells in parallel, in processes that keep their caches."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tqdm import tqdm

CLOCK = time.process_time
"""Counts budgets. A search is one process, so that what else the machine does is not counted."""

Given = TypeVar("Given")
Found = TypeVar("Found")


def side_by_side(
    do: Callable[[Given], Found], given: Sequence[Given], num_processes: int, desc: str
) -> Iterator[Found]:
    """Results of ``do`` for each of the values in ``given``; started and returned in this order.

    Args:
        do: the function; it must be picklable.
        given: the values. Put first those that take longest or matter most.
        num_processes: processes that run at the same time.
        desc: label of the progress bar.

    Raises:
        BrokenProcessPool: the system has killed a process, perhaps for lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    # ``multiprocessing.Pool`` would wait for ever for a process that was killed.
    with ProcessPoolExecutor(num_processes, context, _start) as pool:
        yield from tqdm(pool.map(do, given), total=len(given), desc=desc, disable=None)


def _start() -> None:
    """Let Ctrl-C end the process; a search would otherwise treat it as the end of its budget."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
