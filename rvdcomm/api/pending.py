"""Pending: calls that run in the background, one after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Pending:
    """A call that was started with ``async_op=True``."""

    future: Future[Tensor | None]

    def wait(self) -> Tensor | None:
        """Wait for the call and return its result, or raise its error."""
        return self.future.result()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.future.done()


def submit(function: Callable[..., Tensor | None], *args: Any) -> Pending:
    """Run ``function(*args)`` after all calls that were submitted before."""
    return Pending(_worker().submit(function, *args))


def drain() -> None:
    """Wait for the calls that still run: ranks have to issue collectives in one order."""
    if _worker.cache_info().currsize:
        _worker().submit(lambda: None).result()


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    """The one thread that runs all asynchronous calls of this process, in the order they came."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rvdcomm")
