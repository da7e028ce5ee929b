"""Tests of ``bench.cluster``.

Tests marked ``cluster`` build a real cluster. They need root, ``ip`` and ``tc``, and are skipped if
one of these is missing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.cluster import netns
from bench.cluster.emulated import Cluster, ClusterError, main
from bench.cluster.spec import build_commands, owner_pid

ROOT = Path(__file__).resolve().parents[2]
RATE = 50e6


def on_real_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that builds a real cluster."""
    missing = netns.missing_requirements()
    skip = pytest.mark.skipif(bool(missing), reason="a cluster needs " + "; ".join(missing))
    marked: Callable[..., None] = pytest.mark.cluster(skip(test))
    return marked


def leftovers(pid: int) -> list[str]:
    """Names of the namespaces of all clusters that process ``pid`` built."""
    listed = netns.call(["ip", "netns", "list"]).splitlines()
    return [line for line in listed if owner_pid(line.split()[0]) == pid]


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def wait_until(condition: Callable[[], bool], timeout_secs: float = 8.0) -> bool:
    deadline = time.monotonic() + timeout_secs
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("options", [[], ["--measure", "--clean"], ["--measure", "--", "true"]])
def test_command_line_requires_exactly_one_action(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options)
    message = "give one of: a command after `--`, --measure, --clean"
    assert message in capsys.readouterr().err


def test_command_line_rejects_an_invalid_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--rate", "fast", "--measure"])
    assert "cannot parse rate 'fast'" in capsys.readouterr().err


def test_run_outside_the_with_block_raises_cluster_error() -> None:
    with pytest.raises(ClusterError, match="use it inside `with Cluster"):
        Cluster(2, 1, RATE).run(["true"], timeout_secs=1)


# --- on a real cluster that several tests share ---------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two hosts of one rank each, 50 Mbit/s between them."""
    with Cluster(hosts=2, ranks_per_host=1, rate_bits_per_sec=RATE) as cluster:
        yield cluster


@on_real_cluster
def test_stream_rate_is_near_the_link_rate(pair: Cluster) -> None:
    # A frame of 1514 bytes carries 1448 bytes of data, so the ideal is 95.6 % of the rate. The
    # lower bound is smaller, because the machine may be busy.
    assert 0.80 * RATE <= pair.measure_stream(1.0) * 8 <= 1.05 * RATE


@on_real_cluster
def test_rank_sees_only_its_host_and_has_its_variables(pair: Cluster) -> None:
    command = "echo $RANK/$WORLD_SIZE on $GROUP_RANK $OMP_NUM_THREADS; ip -4 -o address show eth0"
    results = pair.run(["sh", "-c", command], timeout_secs=5, env={"OMP_NUM_THREADS": "3"})
    for rank, result in enumerate(results):
        first, *addresses = result.stdout.splitlines()
        assert first == f"{rank}/2 on {rank} 3"
        assert [f"10.213.0.{i}/24" in "".join(addresses) for i in (rank + 1, 2 - rank)] == [
            True,
            False,
        ]


# --- removal of clusters --------------------------------------------------------------------------


@on_real_cluster
def test_cluster_adds_no_interface_outside_and_is_removed_after_its_block() -> None:
    before = interfaces()
    with Cluster(hosts=2, ranks_per_host=1, rate_bits_per_sec=RATE) as cluster:
        assert len(_listed(cluster)) == 3
        assert interfaces() == before
    assert _listed(cluster) == []
    cluster.close()


@on_real_cluster
def test_failed_build_of_a_cluster_leaves_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ["ip", "link", "add", "type", "nonsense"]
    monkeypatch.setattr(
        "bench.cluster.emulated.build_commands", lambda spec: [*build_commands(spec)[:6], broken]
    )
    cluster = Cluster(hosts=2, ranks_per_host=1, rate_bits_per_sec=RATE)
    with pytest.raises(ClusterError, match="`ip link add type nonsense` failed"), cluster:
        pass
    assert _listed(cluster) == []


@on_real_cluster
def test_background_process_of_a_rank_is_killed_with_the_cluster(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with Cluster(hosts=1, ranks_per_host=1, rate_bits_per_sec=RATE) as cluster:
        cluster.run(["sh", "-c", f"setsid sleep 60 & echo $! > {pid_file}"], timeout_secs=5)
        assert Path("/proc", pid_file.read_text().strip()).exists()
    assert wait_until(lambda: not _runs(int(pid_file.read_text())))


def _listed(cluster: Cluster) -> list[str]:
    names = set(cluster.spec.namespaces)
    return [line for line in leftovers(os.getpid()) if line.split()[0] in names]


def _runs(pid: int) -> bool:
    """Whether ``pid`` runs; an orphan stays a zombie until init reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


RUNNING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from bench.cluster.emulated import Cluster
with Cluster(hosts=2, ranks_per_host=1, rate_bits_per_sec=50e6) as cluster:
    cluster.run(["sh", "-c", "echo $$ > " + sys.argv[1] + "/$RANK; sleep 60"], timeout_secs=60)
"""
BUILDING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from bench.cluster import emulated as cluster
call, calls = cluster.call, []
def call_and_interrupt(command):
    calls.append(command)
    if len(calls) == 7:
        os.kill(os.getpid(), int(sys.argv[1]))
    return call(command)
cluster.call = call_and_interrupt
with cluster.Cluster(hosts=2, ranks_per_host=1, rate_bits_per_sec=50e6):
    print("not reached")
"""


def start_child(script: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ranks_of(directory: Path) -> list[int]:
    """Wait until both ranks of RUNNING have written their pids, and return the pids."""
    files = [directory / "0", directory / "1"]
    assert wait_until(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files))
    return [int(f.read_text()) for f in files]


@on_real_cluster
@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)],
)
def test_signal_to_a_running_cluster_removes_its_namespaces_and_processes(
    signum: int, status: int, tmp_path: Path
) -> None:
    with start_child(RUNNING, str(tmp_path)) as child:
        pids = ranks_of(tmp_path)
        child.send_signal(signum)
        assert child.wait(8) == status
    assert leftovers(child.pid) == []
    assert [pid for pid in pids if _runs(pid)] == []


@on_real_cluster
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_the_build_of_a_cluster_removes_its_namespaces(signum: int) -> None:
    with start_child(BUILDING, str(int(signum))) as child:
        assert child.communicate(timeout=8)[0] == ""
    assert child.returncode in {128 + signum, -signum}
    assert leftovers(child.pid) == []


@on_real_cluster
def test_clean_removes_only_the_cluster_of_a_killed_process(pair: Cluster, tmp_path: Path) -> None:
    with start_child(RUNNING, str(tmp_path)) as child:
        pids = ranks_of(tmp_path)
        child.kill()
    assert len(leftovers(child.pid)) == 3
    assert main(["--clean"]) == 0
    assert leftovers(child.pid) == []
    assert wait_until(lambda: not any(_runs(pid) for pid in pids))
    assert len(_listed(pair)) == 3


@on_real_cluster
def test_command_line_runs_a_command_on_every_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--ranks-per-host", "2", "--rate", "1gbit", "--log-dir", str(tmp_path)]
    assert main([*options, "--", "sh", "-c", "echo $RANK -- of $WORLD_SIZE"]) == 0
    assert capsys.readouterr().out == "0 -- of 4\n"
    assert (tmp_path / "rank3.stdout").read_text() == "3 -- of 4\n"


@on_real_cluster
@pytest.mark.parametrize(
    ("command", "status"), [(["false"], 1), (["sleep", "60"], 124), (["/no/such/program"], 1)]
)
def test_exit_status_is_1_for_a_failure_and_124_for_a_timeout(
    command: list[str], status: int
) -> None:
    assert main(["--timeout", "0.5", "--", *command]) == status
