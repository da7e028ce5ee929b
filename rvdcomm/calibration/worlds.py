"""Worlds: the processes that measure, which a launcher started or which are started here."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path as FilePath
from traceback import format_exception_only
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from rvdcomm import CommError

POLL_SECS = 0.5

_STORE, _ERROR = "store", "error"
"""Files that the processes share."""


def joined(backend: str, timeout: timedelta, run: Callable[[], None]) -> None:
    """Join as the rank that a launcher such as torchrun assigned to this process, and ``run``.

    Raises:
        CommError: the world did not come together.
    """
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise CommError(f"calibrate: the world did not come together: {error}") from None
    _run_and_leave(run)


def spawned(
    num_ranks: int, timeout: timedelta, limit_secs: float, run: Callable[..., None], *args: Any
) -> None:
    """Call ``run(*args)`` in ``num_ranks`` new processes of one gloo world; ``run`` must pickle.

    Raises:
        CommError: a process failed, or they took longer than ``limit_secs``; all are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = (num_ranks, folder, timeout, run, args)
        # Ranks are forked from a server that has imported torch once, and has no threads yet.
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        start: Any = start_processes  # Torch has no types for it.
        context = start(_rank, args=call, nprocs=num_ranks, join=False, start_method="forkserver")
        deadline = time.monotonic() + limit_secs
        try:
            while not context.join(timeout=POLL_SECS):
                if time.monotonic() > deadline:
                    raise CommError(
                        f"calibrate: {num_ranks} processes took longer than {limit_secs:g} s."
                    )
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise CommError(f"calibrate: {_first_error(folder) or _last_line(error)}") from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _rank(
    rank: int,
    num_ranks: int,
    folder: str,
    timeout: timedelta,
    run: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # The loopback device also works if the host name resolves to no address of this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/{_STORE}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout
    )
    _run_and_leave(lambda: _run_or_tell(folder, lambda: run(*args)))


def _run_or_tell(folder: str, run: Callable[[], None]) -> None:
    """Write down the first error of all ranks while this rank is still connected.

    The other ranks fail because this one leaves, and their processes may end before its own.
    """
    try:
        run()
    except Exception as error:
        with suppress(FileExistsError), FilePath(folder, _ERROR).open("x") as file:
            file.write(_last_line(error))
        raise


def _first_error(folder: str) -> str:
    path = FilePath(folder, _ERROR)
    return path.read_text() if path.exists() else ""


def _last_line(error: Exception) -> str:
    """The last line of an error's traceback; the text of torch's error is itself a traceback."""
    return format_exception_only(error)[-1].strip().splitlines()[-1]


def _run_and_leave(run: Callable[[], None]) -> None:
    try:
        run()
        # Rank 0 may serve the store: it leaves last.
        dist.barrier()
    finally:
        dist.destroy_process_group()
