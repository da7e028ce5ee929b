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


def test_results_are_in_rank_order_with_the_output_of_each_rank() -> None:
    results = run_ranks(launches(*["echo out $RANK; echo err $RANK >&2"] * 3), timeout_secs=5)
    assert [(r.rank, r.host, r.exit_status) for r in results] == [(0, 0, 0), (1, 0, 0), (2, 1, 0)]
    assert [r.stdout for r in results] == ["out 0\n", "out 1\n", "out 2\n"]
    assert [r.stderr for r in results] == ["err 0\n", "err 1\n", "err 2\n"]


def test_secs_is_measured_for_each_rank_separately() -> None:
    short, long = run_ranks(launches("true", "sleep 0.4"), timeout_secs=5)
    assert short.secs < 0.3 < 0.4 <= long.secs


def test_only_rank_0_is_echoed(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(launches(*["echo out $RANK; echo err $RANK >&2"] * 2), timeout_secs=5)
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


def test_error_names_the_failing_rank_with_status_and_stderr() -> None:
    with pytest.raises(RankFailedError, match="rank 2 on host 1 ended with exit status 3") as info:
        run_ranks(launches("sleep 60", "sleep 60", "echo why >&2; exit 3"), timeout_secs=30)
    assert (info.value.rank, info.value.exit_status) == (2, 3)
    assert str(info.value).endswith("its stderr ends:\n  why")


def test_error_shows_only_the_tail_of_a_long_stderr() -> None:
    with pytest.raises(RankFailedError) as info:
        run_ranks(launches("seq 1000 1100 >&2; exit 1"), timeout_secs=5)
    lines = str(info.value).splitlines()[1:]
    assert lines == [f"  {number}" for number in range(1086, 1101)]


def test_error_names_the_signal_that_killed_a_rank() -> None:
    with pytest.raises(RankFailedError, match="rank 1 on host 0 was killed by SIGSEGV") as info:
        run_ranks(launches("sleep 60", "kill -SEGV $$"), timeout_secs=30)
    assert info.value.exit_status == -signal.SIGSEGV


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
