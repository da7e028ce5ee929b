"""Workers: processes that look at candidates side by side, or this process alone."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from tqdm import tqdm

from superscaler_core.planners.search.evaluate import Looked, evaluate, look, trial_of
from superscaler_core.planners.search.request import Candidate, Look, Request, Trial


class Workers:
    """Looks at candidates of one request; a context, at whose end no process is left.

    A candidate that cannot be sent to another process is looked at here, and so is one whose
    process is ended by the system, for its memory perhaps.

    Processes and pipes, not a pool of the standard library: a pool ends only when all that was
    begun has ended, and a search does not wait for candidates after its budget.

    Args:
        request: of all candidates.
        num_processes: with one, all is done here, one after another.
    """

    def __init__(self, request: Request, num_processes: int) -> None:
        self._request = request
        self._here: deque[tuple[Candidate, Look]] = deque()
        self._away: dict[Connection, tuple[Candidate, Look]] = {}
        can_send = num_processes > 1 and _pickled(request) is not None
        self._workers = dict(_started(request) for _ in range(num_processes if can_send else 0))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._workers]:
            self._end(connection)

    @property
    def has_room(self) -> bool:
        """Whether another candidate would be begun at once."""
        return len(self._here) + len(self._away) < max(1, len(self._workers))

    def begin(self, candidate: Candidate, how: Look) -> None:
        """Look at a candidate when there is room."""
        idle = next((each for each in self._workers if each not in self._away), None)
        sent = _pickled((candidate.samples, candidate.sprogram, how))
        if idle is None or sent is None:
            self._here.append((candidate, how))
            return
        self._away[idle] = candidate, how
        try:
            idle.send_bytes(sent)
        except OSError:
            self._lose(idle)

    def wait(self, timeout_secs: float | None = None) -> Trial | None:
        """The next that ends; None if none is under way, or none ends in time if that is given."""
        if not self._here and self._away:
            timeout_secs = None if timeout_secs is None else max(0.0, timeout_secs)
            for connection in wait([*self._away], timeout_secs)[:1]:
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._lose(connection)
                    break
                candidate, _ = self._away.pop(connection)
                if isinstance(answer, Exception):
                    raise answer
                return trial_of(candidate, answer)
        return evaluate(self._request, *self._here.popleft()) if self._here else None

    def _lose(self, connection: Connection) -> None:
        """Look here at what a worker has that has ended."""
        self._here.append(self._away.pop(connection))
        self._end(connection)

    def _end(self, connection: Connection) -> None:
        """End a worker, whatever it does."""
        process = self._workers.pop(connection)
        connection.close()
        process.terminate()
        process.join()


def _started(request: Request) -> tuple[Connection, SpawnProcess]:
    """A worker, by the end of its pipe that is ours."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # A daemon ends with this process, however that ends.
    process = context.Process(target=_answer, args=(theirs, request), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _pickled(value: object) -> bytes | None:
    """What is sent of a value; None if it cannot be."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _answer(connection: Connection, request: Request) -> None:
    """What a worker does: look at the candidates that it is sent, until there is no one to answer.

    A fault of this package is an answer too.
    """
    # Ctrl-C is for the process that searches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The usual lock of progress bars is a semaphore of the system, which would be left behind.
    tqdm.set_lock(threading.RLock())
    with suppress(EOFError, OSError):
        while True:
            samples, sprogram, how = connection.recv()
            connection.send(_looked(request, samples, sprogram, how))


def _looked(
    request: Request, samples: int, sprogram: Callable[..., None], how: Look
) -> Looked | Exception:
    try:
        return look(request, samples, sprogram, how)
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error
