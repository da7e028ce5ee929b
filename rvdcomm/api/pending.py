"""Pending: calls that are under way while their caller goes on."""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor

from rvdcomm.errors import LayoutError
from rvdcomm.run.world import World

Result = Any
"""This rank's shard or None; for ``redistribute_many``, a dict of these by name."""

Job = Callable[[], Result]


class Pending(ABC):
    """A call that was started with ``async_op=True``.

    Until ``wait`` has returned, the caller may not change or free the tensors that it passed, nor
    use ``out``. A call whose handle is dropped still runs to its end, because other ranks need it.
    A process that ends waits for it, at most for the group's timeout.

    ``future`` is for callbacks and for asyncio. Its result is the result of ``wait``. On a GPU the
    caller's stream may use that result only after ``wait``. A callback may run on the thread that
    runs the calls. It must make no call there and wait for none: both raise a LayoutError.
    """

    @property
    @abstractmethod
    def future(self) -> Future[Result]:
        """The call as a future of Python's."""

    @abstractmethod
    def wait(self) -> Result:
        """Wait for the call and return its result, or raise its error.

        On a GPU the caller's current stream waits for the data, and this function returns at once.
        """

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.future.done()

    def forget(self) -> None:  # noqa: B027 - most cannot be forgotten
        """Let the process end before the call does, because its result is not needed.

        Only messages that were posted can be forgotten; other calls run to their end.
        """


@dataclass(frozen=True)
class _InBackground(Pending):
    """A call that a thread runs."""

    running: Future[Result]
    join: Callable[[Result], None] | None = None

    @property
    def future(self) -> Future[Result]:
        return self.running

    def wait(self) -> Result:
        if not self.running.done():
            _THREAD.check_outside("wait() of a call in the background")
        result = self.running.result()
        if self.join is not None:
            self.join(result)
        return result


class Posted(Pending):
    """A call whose messages the backend moves by itself, without a thread of ours.

    A thread waits for the call only if the caller asks for ``future`` or ``is_completed``, or if
    more than ``MOST_POSTED`` calls are posted. That thread has no other work. Ranks may post calls
    in different orders, so waiting for them must not delay collectives, which all ranks have to
    issue in one order.

    Args:
        finish: waits for the messages, and returns the result.
        join: called with the result in every ``wait``.
        world: the world of the messages.
    """

    __slots__ = ("_error", "_finish", "_future", "_join", "_lock", "_result", "_world")

    def __init__(
        self,
        finish: Callable[[], Result],
        join: Callable[[Result], None] | None = None,
        world: World | None = None,
    ) -> None:
        self._world = world
        self._finish: Job | None = _as_here(finish)
        self._join = join
        self._result: Result = None
        self._error: BaseException | None = None
        self._future: Future[Result] | None = None
        self._lock = Lock()
        _POSTED[id(self)] = self
        if len(_POSTED) > MOST_POSTED:
            _WAITER.submit(_POSTED.pop(next(iter(_POSTED))).wait)

    @property
    def future(self) -> Future[Result]:
        if self._future is None:
            self._future = _WAITER.submit(self.wait)
        return self._future

    def is_completed(self) -> bool:
        # gloo's works say that they are complete only after their own ``wait``.
        return self._finish is None or self.future.done()

    def forget(self) -> None:
        _POSTED.pop(id(self), None)

    def wait(self) -> Result:
        with self._lock:
            if self._finish is not None:
                try:
                    self._result = self._finish()
                except BaseException as error:
                    self._error = error
                # Release the tensors of the call; no other thread has to wait for it now.
                self._finish = None
                _POSTED.pop(id(self), None)
        if self._error is not None:
            raise self._error
        if self._join is not None:
            self._join(self._result)
        return self._result


def posted(
    finish: Callable[[], Result], device: torch.device, world: World | None = None
) -> Posted:
    """A call whose messages ``finish`` waits for; on a GPU it lets a stream wait for them."""
    if device.type != "cuda":
        return Posted(finish, world=world)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def finish_on_stream() -> Result:
        # Another thread may run this on another stream, so the caller's stream waits for ``done``.
        result = finish()
        done.record(torch.cuda.current_stream(device))
        return result

    return Posted(finish_on_stream, partial(join_stream, device, done), world)


def join_stream(device: torch.device, done: torch.cuda.Event, result: Result) -> None:
    """Let the caller's stream wait for ``done`` before it uses the result."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(done)
    for tensor in result.values() if isinstance(result, dict) else (result,):
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)


MOST_POSTED = 64
"""Most posted calls that no caller waits for. If there are more, a thread waits for the oldest,
so that a dropped handle does not keep its tensors forever."""

_POSTED: dict[int, Posted] = {}


def _forget_posted(world: World) -> None:
    """Drop the posted calls of a world that failed.

    They hold its connections, and the other ranks learn of the failure when these close.
    """
    for call in list(_POSTED.values()):
        if call._world is world:
            call.forget()


World.at_failure.append(_forget_posted)


def submit(job: Job, device: torch.device, tensors: Sequence[Tensor | None]) -> Pending:
    """Run ``job``, which uses ``tensors``, after all earlier jobs.

    Raises:
        LayoutError: this is the thread that runs the jobs, in a callback of a job.
    """
    _THREAD.check_outside("a call")
    if device.type != "cuda":
        return _InBackground(_THREAD.submit(job))
    if device not in _SIDES:
        _SIDES[device] = SideStream(device)
    return _SIDES[device].submit(job, [tensor for tensor in tensors if tensor is not None])


def drain() -> None:
    """Wait for all calls in the background, because ranks must issue collectives in one order.

    Raises:
        LayoutError: as of ``submit``.
    """
    _THREAD.check_outside("a call")
    if _THREAD.last is not None:
        _THREAD.drain()
        for side in _SIDES.values():
            side.drain()


World.settlers.append(drain)


def _as_here(job: Job) -> Job:
    """A job that runs ``job`` with the context variables and the inference mode of this thread."""
    context, is_inference = copy_context(), torch.is_inference_mode_enabled()

    def run() -> Result:
        # Only in inference mode may tensors that were made in it be written.
        with torch.inference_mode(is_inference):
            return context.run(job)

    return run


class Thread:
    """A thread that runs jobs of this process, in order."""

    def __init__(self) -> None:
        self.last: Future[Result] | None = None
        self._number: int | None = None

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "rvdcomm", initializer=self._begin)

    def _begin(self) -> None:
        self._number = get_ident()

    def submit(self, job: Job) -> Future[Result]:
        """Run ``job`` after all earlier jobs."""
        self.last = self._pool.submit(_as_here(job))
        return self.last

    def check_outside(self, what: str) -> None:
        """Raise if this is the thread itself, which would wait for jobs that only it can run.

        Raises:
            LayoutError: it is; a callback of a job asked for ``what``.
        """
        if get_ident() == self._number:
            raise LayoutError(
                f"{what} inside a callback of a call with async_op=True: the callback runs on the "
                "thread that runs all such calls, so it would wait for itself. Let the callback "
                "tell another thread, or await the future (asyncio.wrap_future)."
            )

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
        running = _THREAD.submit(partial(self._run, job, done))
        return _InBackground(running, partial(join_stream, self._device, done))

    def drain(self) -> None:
        """Let the caller's stream wait for all calls: they share staging memory."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _run(self, job: Job, done: torch.cuda.Event) -> Result:
        with torch.cuda.stream(self._stream):
            result = job()
            done.record(self._stream)
        return result


_THREAD = Thread()
_WAITER = Thread()
"""Waits for posted calls that no caller waits for."""

_SIDES: dict[torch.device, SideStream] = {}


def _after_fork() -> None:
    # A forked child has neither the thread nor the calls that it runs.
    global _THREAD, _WAITER
    _THREAD, _WAITER = Thread(), Thread()
    _SIDES.clear()
    _POSTED.clear()


def _finish_posted() -> None:
    """At the end of a process: other ranks need what it has posted."""
    for call in list(_POSTED.values()):
        with suppress(Exception):
            call.wait()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_finish_posted)
