"""Threads: runs all ranks of a program in one process, for tests and for trying a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from superscaler_core.run.load import module_of, started
from superscaler_core.run.program_folder import CONSTANTS, ProgramFolder, load_constants
from superscaler_core.run.rank import Rank
from superscaler_core.run.trainer import Trainer
from superscaler_core.run.transport import Board, ThreadTransport

T = TypeVar("T")


def run_threads(
    folder: str | Path,
    work: Callable[[Trainer], T],
    ranks: Mapping[int, Any] | range,
    *,
    timeout_secs: float = 60.0,
    **options: Any,
) -> dict[int, T]:
    """Call ``work(trainer)`` on every rank, each in a thread; return the results by rank.

    Communication is by ``rvdcomm.simulate``: it is correct and its bytes are counted, but slow.

    Args:
        folder: a program that ``Compiled.save`` wrote.
        work: called on every rank; collective calls must have the same order on all ranks.
        ranks: ranks of the program.
        timeout_secs: a rank that waits longer than this for another rank fails.
        options: options of ``Rank``.

    Raises:
        Exception: the exception of the first rank that failed.
    """
    # Read once, outside the threads: numpy parses headers with `ast`, whose recursion depth CPython
    # 3.11 and 3.12 count per interpreter, so two threads in it raise SystemError. Every rank has a
    # copy, because loading a state changes the values.
    program = ProgramFolder.open(folder)
    constants = load_constants(program.read(CONSTANTS))

    def serve(transport: ThreadTransport) -> T:
        own = {name: value.clone() for name, value in constants.items()}
        made = Rank(module_of(program, transport.rank), transport, own, **options)
        return work(started(Trainer(made, transport), program))

    return in_threads(serve, ranks, timeout_secs=timeout_secs)


def in_threads(
    work: Callable[[ThreadTransport], T],
    ranks: Mapping[int, Any] | range,
    *,
    timeout_secs: float = 60.0,
) -> dict[int, T]:
    """Call ``work`` on every rank, each in a thread with its transport; return the results.

    Args:
        work: called on every rank.
        ranks: the ranks.
        timeout_secs: a rank that waits longer than this for another rank fails.

    Raises:
        Exception: the exception of the first rank that failed.
    """
    board = Board(timeout_secs, len(ranks))
    results: dict[int, T] = {}

    def serve(rank: int) -> None:
        try:
            results[rank] = work(ThreadTransport(rank, board))
        except BaseException as error:
            board.fail(error)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in ranks]
    grad = torch.is_grad_enabled()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_grad_enabled(grad)
    if board.error is not None:
        raise board.error
    return results
