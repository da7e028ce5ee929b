"""Start one process per rank, watch them, and stop all when one fails or the time is up.

Each rank leads a process group of its own, so stopping a rank also stops its children. The stdout
and stderr of each rank go to files; those of the first rank are copied to ours while it runs.
"""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bench.cluster.cleanup import shielded

POLL_SECS = 0.01
# Time for a rank to act on SIGTERM (for example to unlink its shared memory) before SIGKILL.
GRACE_SECS = 1.0
TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Launch:
    """One rank to start: its command line and its complete environment."""

    rank: int
    host: int
    command: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of one rank; ``exit_status`` is that of ``subprocess``, negative for a signal."""

    rank: int
    host: int
    exit_status: int
    secs: float
    stdout: str
    stderr: str


class RankFailedError(RuntimeError):
    """A rank ended with a status other than 0; the others were stopped."""

    def __init__(self, message: str, rank: int, exit_status: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_status = exit_status


class RankTimeoutError(RuntimeError):
    """Some ranks were still running when the time was up; all ranks were stopped."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class _Echo:
    """Copies new content of a file to a stream, never splitting a UTF-8 character."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.file = path.open("rb")
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pump(self) -> None:
        if text := self.decoder.decode(self.file.read()):
            self.stream.write(text)
            self.stream.flush()

    def close(self) -> None:
        self.pump()
        self.file.close()


class _Rank:
    """A started process of a rank."""

    def __init__(self, launch: Launch, log_dir: Path) -> None:
        self.launch = launch
        self.stdout_path = log_dir / f"rank{launch.rank}.stdout"
        self.stderr_path = log_dir / f"rank{launch.rank}.stderr"
        self.start = time.monotonic()
        self.secs = 0.0
        with self.stdout_path.open("wb") as stdout, self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                launch.command,
                env=dict(launch.env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return the exit status, or None while the rank runs."""
        if self.process.returncode is None and self.process.poll() is not None:
            self.secs = time.monotonic() - self.start
        return self.process.returncode

    def signal_group(self, signum: int) -> None:
        # An unreaped leader holds its pid, so the group is ours for as long as poll() says None.
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)

    def stderr_tail(self) -> str:
        lines = self.stderr_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        if not lines:
            return "its stderr is empty."
        return "its stderr ends:\n" + "\n".join(f"  {line}" for line in lines)

    def result(self) -> RankResult:
        return RankResult(
            rank=self.launch.rank,
            host=self.launch.host,
            exit_status=self.process.returncode,
            secs=self.secs,
            stdout=self.stdout_path.read_text(errors="replace"),
            stderr=self.stderr_path.read_text(errors="replace"),
        )


def run_ranks(
    launches: Sequence[Launch],
    *,
    timeout_secs: float,
    log_dir: Path | None = None,
    echo: bool = True,
) -> list[RankResult]:
    """Run all ranks until they end and return their results, in the order of ``launches``.

    No rank outlives the call, whether it returns or raises.

    Args:
        launches: the ranks; the first one is echoed.
        timeout_secs: how long all ranks together may take.
        log_dir: directory that keeps ``rank<N>.stdout`` and ``rank<N>.stderr``; if None, a
            temporary directory that is removed at the end.
        echo: copy the output of the first rank to ours while it runs.

    Raises:
        RankFailedError: a rank failed; has its status and the tail of its stderr.
        RankTimeoutError: the time was up; has the ranks that were still running.
    """
    with ExitStack() as stack:
        directory = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        ranks: list[_Rank] = []
        stack.callback(_stop, ranks)
        for launch in launches:
            with shielded():
                ranks.append(_Rank(launch, directory))
        echoes = _echoes(ranks[0]) if echo else []
        for each in echoes:
            stack.callback(each.close)
        _watch(ranks, echoes, timeout_secs)
        return [rank.result() for rank in ranks]


def _echoes(rank: _Rank) -> list[_Echo]:
    return [_Echo(rank.stdout_path, sys.stdout), _Echo(rank.stderr_path, sys.stderr)]


def _watch(ranks: Sequence[_Rank], echoes: Sequence[_Echo], timeout_secs: float) -> None:
    """Return when all ranks ended with status 0; raise as soon as one failed or the time is up."""
    deadline = time.monotonic() + timeout_secs
    while True:
        for echo in echoes:
            echo.pump()
        statuses = [rank.poll() for rank in ranks]
        failed = [rank for rank, status in zip(ranks, statuses, strict=True) if status]
        if failed:
            raise _failure(failed)
        running = [rank for rank, status in zip(ranks, statuses, strict=True) if status is None]
        if not running:
            return
        if time.monotonic() >= deadline:
            raise _timeout(running, timeout_secs)
        time.sleep(POLL_SECS)


def _failure(failed: Sequence[_Rank]) -> RankFailedError:
    first, *others = failed
    status = first.process.returncode
    also = f" (ranks {[rank.launch.rank for rank in others]} failed too)" if others else ""
    message = (
        f"rank {first.launch.rank} on host {first.launch.host} {_ending(status)}{also}; "
        f"the other ranks were stopped; {first.stderr_tail()}"
    )
    return RankFailedError(message, first.launch.rank, status)


def _timeout(running: Sequence[_Rank], timeout_secs: float) -> RankTimeoutError:
    numbers = [rank.launch.rank for rank in running]
    message = (
        f"ranks {numbers} were still running after {timeout_secs:g} s and were stopped; "
        f"of rank {numbers[0]}: {running[0].stderr_tail()}"
    )
    return RankTimeoutError(message, numbers)


def _ending(status: int) -> str:
    if status > 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _stop(ranks: Sequence[_Rank]) -> None:
    """End all ranks that still run: SIGTERM, and SIGKILL after the grace time."""
    with shielded():
        for rank in ranks:
            rank.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECS
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(POLL_SECS)
        for rank in ranks:
            rank.signal_group(signal.SIGKILL)
            rank.process.wait()
