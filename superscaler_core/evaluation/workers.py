"""Workers: processes that evaluate candidates side by side, or this process alone."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from tqdm import tqdm

from superscaler_core.evaluation.evaluate import evaluate
from superscaler_core.evaluation.request import Candidate, Request, Scope, Trial


class Workers:
    """A context that evaluates candidates of one request, and ends all its processes at exit.

    A candidate that cannot be pickled is evaluated in this process. So is a candidate whose process
    was ended by the system, for example because memory was short. With one process, all evaluations
    are in this process, in turn.

    Each worker is a process with a pipe. A pool of the standard library would end only when all
    begun work has ended, but a search does not wait for candidates after its budget.
    """

    def __init__(self, request: Request, num_processes: int) -> None:
        self._request = request
        self._here: deque[tuple[Candidate, Scope]] = deque()
        self._away: dict[Connection, tuple[Candidate, Scope]] = {}
        can_send = num_processes > 1 and _pickled(request) is not None
        count = num_processes if can_send else 0
        self._workers = dict(_started(request, number) for number in range(count))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._workers]:
            self._end(connection)

    @property
    def has_room(self) -> bool:
        """Whether an evaluation of another candidate would begin at once."""
        return len(self._here) + len(self._away) < max(1, len(self._workers))

    @property
    def are_apart(self) -> bool:
        """Whether evaluations are in other processes, so that they can be abandoned."""
        return bool(self._workers)

    def begin(self, candidate: Candidate, how: Scope) -> None:
        """Begin to evaluate a candidate, in an idle worker if possible, else in this process."""
        idle = next((each for each in self._workers if each not in self._away), None)
        sent = _pickled((Candidate("", candidate.samples, candidate.sprogram), how))
        if idle is None or sent is None:
            self._here.append((candidate, how))
            return
        self._away[idle] = candidate, how
        try:
            idle.send_bytes(sent)
        except OSError:
            self._lose(idle)

    def wait(self, timeout_secs: float | None = None) -> Trial | None:
        """The next trial to end; None if no evaluation is under way or none ends before the
        timeout.
        """
        if not self._here and self._away:
            timeout_secs = None if timeout_secs is None else max(0.0, timeout_secs)
            for connection in wait([*self._away], timeout_secs)[:1]:
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._lose(connection)
                    break
                except KeyboardInterrupt:
                    # Part of the answer may have been read, so the rest cannot be.
                    self._lose(connection)
                    raise
                candidate, _ = self._away.pop(connection)
                if isinstance(answer, Exception):
                    raise answer
                assert isinstance(answer, Trial)
                return replace(answer, candidate=candidate)
        if not self._here:
            return None
        # An evaluation that is interrupted stays the first, and begins again with the next call.
        trial = evaluate(self._request, *self._here[0])
        self._here.popleft()
        return trial

    def forget(self) -> None:
        """Forget the evaluations of this process that have not ended."""
        self._here.clear()

    def abandon(self) -> None:
        """End all evaluations that are under way, and the workers that they are in."""
        self.forget()
        for connection in [*self._away]:
            del self._away[connection]
            self._end(connection)

    def _lose(self, connection: Connection) -> None:
        """Take over the candidate of a worker whose process has died."""
        self._here.append(self._away.pop(connection))
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        process = self._workers.pop(connection)
        connection.close()
        process.terminate()
        process.join()


def _started(request: Request, number: int) -> tuple[Connection, SpawnProcess]:
    """A new worker: our end of its pipe, and its process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # A daemon process is ended when this process exits, also by an error.
    process = context.Process(target=_answer, args=(theirs, request, number), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _pickled(value: object) -> bytes | None:
    """A value as bytes to send; None if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _answer(connection: Connection, request: Request, number: int) -> None:
    """The main loop of a worker: evaluate the candidates it receives, until the pipe is closed.

    It captures the model first, beside the process that searches, which begins with another size.
    An exception that is a defect of this package is sent back as an answer.
    """
    # Ctrl-C is handled by the process that searches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # By default tqdm's lock is a system semaphore, which would leak when this process is ended.
    tqdm.set_lock(threading.RLock())
    with suppress(EOFError, OSError):
        if request.captured is not None:
            # An error is raised again where the graph is used.
            with suppress(Exception):
                request.captured.begin(number + 1)
        while True:
            connection.send(_evaluated(request, *connection.recv()))


ELSEWHERE = Candidate("", 1, print)
"""Stands for the candidate in a trial that is sent: the process that searches has it."""


def _evaluated(request: Request, candidate: Candidate, how: Scope) -> Trial | Exception:
    """The trial without its candidate, which the process that searches has."""
    try:
        return replace(evaluate(request, candidate, how), candidate=ELSEWHERE)
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error
