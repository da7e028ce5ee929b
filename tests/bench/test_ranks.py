"""Tests of ``bench.cluster.ranks``, with plain processes: neither root nor namespaces."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bench.cluster.ranks import Launch, RankFailedError, RankTimeoutError, run_ranks


def launches(*scripts: str) -> list[Launch]:
    """One rank per shell script, and two ranks per host."""
    return [
        Launch(rank, rank // 2, ["sh", "-c", script], {**os.environ, "RANK": str(rank)})
        for rank, script in enumerate(scripts)
    ]


def lives(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def dies_soon(pid: int) -> bool:
    """Whether ``pid`` ends within a second; the kernel may end a killed process with a delay."""
    deadline = time.monotonic() + 1.0
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not lives(pid)


def test_results_are_in_rank_order_and_only_rank_0_is_echoed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = "echo out $RANK; echo err $RANK >&2"
    results = run_ranks(launches(script, script, f"{script}; sleep 0.4"), timeout_secs=5)
    assert [(r.rank, r.host, r.exit_status) for r in results] == [(0, 0, 0), (1, 0, 0), (2, 1, 0)]
    assert [r.stdout for r in results] == ["out 0\n", "out 1\n", "out 2\n"]
    assert [r.stderr for r in results] == ["err 0\n", "err 1\n", "err 2\n"]
    assert results[0].secs < 0.3 < 0.4 <= results[2].secs
    assert capsys.readouterr() == ("out 0\n", "err 0\n")


def test_rank_0_is_echoed_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankTimeoutError):
        run_ranks(launches("echo early; sleep 60"), timeout_secs=0.3)
    assert capsys.readouterr().out == "early\n"


def test_echo_decodes_a_character_that_is_written_in_two_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_ranks(launches(r"printf '\303'; sleep 0.1; printf '\244'"), timeout_secs=5)
    assert capsys.readouterr().out == "ä"


def test_output_of_ranks_is_kept_in_log_dir(tmp_path: Path) -> None:
    run_ranks(launches("echo a", "echo b >&2"), timeout_secs=5, log_dir=tmp_path / "made")
    names = ["rank0.stderr", "rank0.stdout", "rank1.stderr", "rank1.stdout"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == names
    assert (tmp_path / "made" / "rank1.stderr").read_text() == "b\n"


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ("echo why >&2; exit 3", 3, "ended with exit status 3.*its stderr ends:\n  why$"),
        ("kill -SEGV $$", -signal.SIGSEGV, "was killed by SIGSEGV"),
        ("seq 1000 1100 >&2; exit 1", 1, ":\n  1086\n  1087(\n  1[01].*){13}$"),
    ],
)
def test_error_names_the_failing_rank_with_status_and_the_tail_of_its_stderr(
    script: str, status: int, message: str
) -> None:
    with pytest.raises(RankFailedError, match=f"(?s)rank 2 on host 1 .*{message}") as info:
        run_ranks(launches("sleep 60", "sleep 60", script), timeout_secs=30)
    assert (info.value.rank, info.value.exit_status) == (2, status)


def test_failure_stops_the_other_ranks(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    wait = f"while [ ! -s {pid_file} ]; do sleep 0.01; done; exit 1"
    with pytest.raises(RankFailedError):
        run_ranks(launches(f"echo $$ > {pid_file}; sleep 60", wait), timeout_secs=30)
    assert dies_soon(int(pid_file.read_text()))


def test_hanging_ranks_are_named_and_killed_at_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"ranks \[1, 2\] were still running after 0.3 s"):
        run_ranks(launches("true", "sleep 60", "sleep 60"), timeout_secs=0.3)
    assert time.monotonic() - start < 5


def test_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    # The rank has a child; both ignore SIGTERM, since ignored signals are inherited.
    pids = tmp_path / "pids"
    stubborn = f"trap '' TERM; sleep 60 & echo $$ $! > {pids}; wait"
    with pytest.raises(RankTimeoutError):
        run_ranks(launches(stubborn), timeout_secs=0.3)
    rank, child = map(int, pids.read_text().split())
    assert dies_soon(rank)
    assert dies_soon(child)


def test_missing_command_leaves_no_running_rank(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    good = Launch(0, 0, [sys.executable, "-c", script], os.environ)
    bad = Launch(1, 0, ["/no/such/program"], os.environ)
    with pytest.raises(FileNotFoundError):
        run_ranks([good, bad], timeout_secs=5)
    assert not pid_file.exists() or dies_soon(int(pid_file.read_text() or 0))
