"""Worlds of processes for tests: started once, then used to run one function after another.

Ranks are forked from a server that has already imported torch, so a world of 12 ranks starts in
less than a second. Every wait here has a deadline, and no process outlives ``stop``.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

START_SECS = 60.0
RUN_SECS = 60.0
STOP_SECS = 5.0
# After the first error, the other ranks have this time to report theirs; then they count as hung.
GRACE_SECS = 1.0

_ENV = {
    "OMP_NUM_THREADS": "1",
    # The tests must also work if the host name does not resolve to an address of this machine.
    "GLOO_SOCKET_IFNAME": "lo",
}
_PRELOADED = [
    *("numpy", "pytest", "torch", "torch.distributed", "rvdcomm.api", "tests.oracle"),
    # The first backward of a process imports this module, which imports sympy.
    "torch.fx.experimental.symbolic_shapes",
    "superscaler_core.training.load",
]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of a rank to a call: a value, or an error with the text of its traceback."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class ProcessWorld:
    """Processes that form one world, restarted after every failure.

    Args:
        num_ranks: number of ranks; each is a process.
        timeout_secs: timeout of the process group.
        backend: "gloo" or "nccl". With NCCL, the available GPUs are assigned to the ranks in turn.
    """

    def __init__(self, num_ranks: int, timeout_secs: float = 20.0, backend: str = "gloo") -> None:
        self.num_ranks = num_ranks
        self.timeout_secs = timeout_secs
        self.backend = backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._is_idle = False

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        dying: Collection[int] = (),
        timeout_secs: float = RUN_SECS,
    ) -> list[Any]:
        """Return ``[function(rank, *args) for every rank]``, each called in its own process.

        Args:
            function: a function at the top level of a module, so that it can be pickled.
            args: further arguments; they must be picklable.
            dying: ranks that end their process instead of returning; their result is None.
            timeout_secs: time after which the ranks that still run are killed.

        Raises:
            Exception: the first error; a note for every failed rank has the rank and its traceback.
            TimeoutError: some ranks did not return.
            ChildProcessError: a rank ended its process.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            answers = self._collect(timeout_secs, set(dying))
        except BaseException:
            self.stop()
            raise
        if dying:
            self.stop()
        return [answers[rank].value for rank in range(self.num_ranks)]

    def stop(self) -> None:
        """End all processes; the next ``run`` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        # An idle rank ends when its pipe closes; a rank in a call does not notice this. Rank 0
        # serves the store and ends last, because the other ranks print errors without the store.
        deadline = time.monotonic() + (STOP_SECS if self._is_idle else 0.0)
        for process in reversed(self._processes):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(STOP_SECS)
            process.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        with _environment(_ENV):
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            for rank in range(self.num_ranks):
                ours, theirs = context.Pipe()
                args = (rank, self.num_ranks, self.timeout_secs, self.backend, theirs)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        try:
            # Rank 0 serves the store, on a port that was free when it asked for one.
            port = self._pipes[0].recv() if self._pipes[0].poll(START_SECS) else None
            for pipe in self._pipes[1:]:
                pipe.send(port)
            self._collect(START_SECS, set())
        except BaseException:
            self.stop()
            raise

    def _collect(self, timeout_secs: float, dying: set[int]) -> dict[int, _Answer]:
        """The answers of all ranks; raises if a rank failed or did not answer."""
        self._is_idle = False
        deadline = time.monotonic() + timeout_secs
        answers: dict[int, _Answer] = {}
        while len(answers) < self.num_ranks and (left := deadline - time.monotonic()) > 0:
            pending = {self._pipes[r]: r for r in range(self.num_ranks) if r not in answers}
            for pipe in wait(list(pending), left):
                rank = pending[pipe]
                answers[rank] = self._receive(rank, rank in dying)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECS)
        self._raise_error(answers, timeout_secs)
        self._is_idle = True
        return answers

    def _receive(self, rank: int, is_dying: bool) -> _Answer:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(STOP_SECS)
            if is_dying:
                return _Answer()
            text = f"the process ended with exit code {process.exitcode}"
            return _Answer(error=ChildProcessError(f"rank {rank}: {text}"), trace=text)

    def _raise_error(self, answers: dict[int, _Answer], timeout_secs: float) -> None:
        """Raise the first error that arrived, with a note for every failed rank."""
        silent = [rank for rank in range(self.num_ranks) if rank not in answers]
        failed = {rank: answer for rank, answer in answers.items() if answer.error is not None}
        if not failed and not silent:
            return
        for rank in silent:
            self._dump_stacks(rank)
        error: BaseException = TimeoutError(f"ranks {silent} did not return in {timeout_secs:g} s")
        if failed:
            error = next(iter(failed.values())).error or error
            if silent:
                error.add_note(f"ranks {silent} were still running (stacks are on stderr)")
        for rank, answer in failed.items():
            error.add_note(f"on rank {rank} of {self.num_ranks}:\n{answer.trace}")
        raise error

    def _dump_stacks(self, rank: int) -> None:
        """Make a hanging rank write the stacks of its threads to stderr."""
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.05)


Worlds = Callable[..., ProcessWorld]
"""The fixture ``worlds``: the module's world of ``(num_ranks, timeout_secs)``."""


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables in the block, and restore the previous values afterwards."""
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- in the processes ---------------------------------------------------------------------------


def _serve(rank: int, num_ranks: int, timeout_secs: float, backend: str, pipe: Connection) -> None:
    """Join the world, and then execute calls until the pipe closes."""
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("error")
    os.environ.update(_ENV)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # NCCL refuses two ranks on one GPU unless they appear to be on different hosts.
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    with suppress(EOFError, BrokenPipeError):
        timeout = timedelta(seconds=timeout_secs)
        port = 0 if rank == 0 else pipe.recv()
        store = dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0, wait_for_workers=False)
        if rank == 0:
            pipe.send(store.port)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
        pipe.send(_Answer())
        while True:
            function, args = pipe.recv()
            pipe.send(_answer(function, rank, args))
    dist.destroy_process_group()


def _answer(function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> _Answer:
    try:
        answer = _Answer(function(rank, *args))
        pickle.dumps(answer)
        return answer
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return _Answer(error=RuntimeError(repr(error)), trace=trace)
        return _Answer(error=error, trace=trace)
