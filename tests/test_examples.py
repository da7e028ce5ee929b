"""The examples run; those for several processes on a world of two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.ranks import Launch, run_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
ON_PROCESSES = ["dtensor.py", "redistribute_gloo.py", "sync_weights.py", "train_gpt.py"]
TIMEOUT_SECS = 60.0


def environment(**more: str) -> dict[str, str]:
    """Ours, with this repository in front of what is installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ON_PROCESSES])
def test_example_runs_in_one_process(name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(
        command,
        env=environment(),
        timeout=TIMEOUT_SECS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.dist
@pytest.mark.parametrize("name", ON_PROCESSES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_example_runs_on_processes(name: str, world_size: int) -> None:
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(world_size),
    }
    launches = [
        Launch(
            rank=rank,
            host=0,
            command=[sys.executable, str(ROOT / "examples" / name)],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **rendezvous),
        )
        for rank in range(world_size)
    ]
    results = run_ranks(launches, timeout_secs=TIMEOUT_SECS, echo=False)
    assert all("all right" in result.stdout for result in results)
