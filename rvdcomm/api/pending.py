"""Pending: calls that run in the background, one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

Job = Callable[[], Tensor | None]


@dataclass(frozen=True)
class Pending:
    """A call that was started with ``async_op=True``.

    Until ``wait`` has returned, the caller may not change or free the tensor that it passed, nor
    use ``out``. A call whose handle is dropped still runs to its end, because other ranks need it.
    A process that ends waits for it, at most for the group's timeout.

    ``future`` is for callbacks and for asyncio. Its result is the result of ``wait``. On a GPU the
    caller's stream may use that result only after ``wait``.
    """

    future: Future[Tensor | None]
    _join: Callable[[Tensor | None], None] | None = None

    def wait(self) -> Tensor | None:
        """Wait for the call and return its result, or raise its error.

        On a GPU the caller's current stream waits for the data, and this function returns at once.
        """
        result = self.future.result()
        if self._join is not None:
            self._join(result)
        return result

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.future.done()


def submit(job: Job, device: torch.device, tensors: Sequence[Tensor | None]) -> Pending:
    """Run ``job``, which uses ``tensors``, after all earlier jobs."""
    if device.type != "cuda":
        return Pending(_THREAD.submit(job))
    if device not in _SIDES:
        _SIDES[device] = SideStream(device)
    return _SIDES[device].submit(job, [tensor for tensor in tensors if tensor is not None])


def drain() -> None:
    """Wait for all calls in the background, because ranks must issue collectives in one order."""
    if _THREAD.last is not None:
        _THREAD.drain()
        for side in _SIDES.values():
            side.drain()


class Thread:
    """The one thread that runs all asynchronous calls of this process, in order."""

    def __init__(self) -> None:
        self.last: Future[Tensor | None] | None = None

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rvdcomm")

    def submit(self, job: Job) -> Future[Tensor | None]:
        self.last = self._pool.submit(job)
        return self.last

    def drain(self) -> None:
        """Wait for all jobs; an error is raised by the ``wait`` of its own call."""
        last = self.last
        if last is not None:
            wait_for([last])
            self.last = None if self.last is last else self.last


class SideStream:
    """A stream of a GPU on which asynchronous calls run while the caller computes.

    It waits for the work that the caller queued before the call. The stream on which the caller
    waits for the call then waits for this one. ``record_stream`` keeps the allocator from reusing
    memory that the other stream still uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, job: Job, tensors: Sequence[Tensor]) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return Pending(_THREAD.submit(partial(self._run, job, done)), partial(self._join, done))

    def drain(self) -> None:
        """Let the caller's stream wait for all calls: they share staging memory."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _run(self, job: Job, done: torch.cuda.Event) -> Tensor | None:
        with torch.cuda.stream(self._stream):
            result = job()
            done.record(self._stream)
        return result

    def _join(self, done: torch.cuda.Event, result: Tensor | None) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        if result is not None and result.is_cuda:
            result.record_stream(stream)


_THREAD = Thread()
_SIDES: dict[torch.device, SideStream] = {}


def _after_fork() -> None:
    # A forked child has neither the thread nor the calls that it runs.
    global _THREAD
    _THREAD = Thread()
    _SIDES.clear()


os.register_at_fork(after_in_child=_after_fork)
