"""Processes: the studies' work side by side, each piece in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tqdm import tqdm

Given = TypeVar("Given")
Found = TypeVar("Found")


def side_by_side(
    do: Callable[[Given], Found], given: Sequence[Given], num_processes: int, desc: str
) -> list[Found]:
    """What a function makes of each of some values, in their order.

    Args:
        do: importable by name.
        given: the largest last: that is begun first, so that none is left alone at the end.
        num_processes: at a time.
        desc: of the progress bar.

    Raises:
        BrokenProcessPool: the system has killed a process, for its memory perhaps.
    """
    context = multiprocessing.get_context("spawn")
    # A pool of another kind would wait for ever for a process that was killed.
    with ProcessPoolExecutor(num_processes, context, max_tasks_per_child=1) as pool:
        found = pool.map(do, given[::-1])
        return list(tqdm(found, total=len(given), desc=desc, disable=None))[::-1]
