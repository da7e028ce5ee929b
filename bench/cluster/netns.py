"""Network namespaces of this machine: whether we may create them, and removal of our own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.cluster.spec import owner_pid

# An `ip` or `tc` call takes milliseconds; one that takes longer than this is stuck.
TOOL_TIMEOUT_SECS = 30.0
# Bits of CapEff in /proc/self/status (linux/capability.h). Root in a container may lack them.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


class ClusterError(RuntimeError):
    """Building or removing a cluster failed on this machine."""


class ClusterUnavailableError(ClusterError):
    """This machine cannot hold a cluster; nothing was created."""


def missing_requirements() -> list[str]:
    """Return what this machine lacks to emulate a cluster, each with its remedy.

    A kernel without ``veth``, ``bridge`` or ``sch_tbf`` is detected only when a cluster is built.
    """
    if os.geteuid() != 0:
        missing = [f"root (this is uid {os.geteuid()}): run it with sudo"]
    else:
        missing = [
            f"the capability {name}: run the container with --privileged"
            for name in _missing_capabilities()
        ]
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            missing.append(f"`{tool}` on PATH: install iproute2 (apt-get install iproute2)")
    return missing


def _missing_capabilities() -> list[str]:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                held = int(line.split()[1], 16)
                return [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    return []


def require_support() -> None:
    """Raise ``ClusterUnavailableError`` with everything that is missing, if anything is."""
    if missing := missing_requirements():
        raise ClusterUnavailableError(
            "cannot emulate a cluster here, nothing was created; it needs " + "; and ".join(missing)
        )


def clean_leftovers() -> list[str]:
    """Remove the clusters whose process is dead, for example after SIGKILL; return their names.

    Clusters of living processes stay.
    """
    require_support()
    listed = call(["ip", "netns", "list"]).splitlines()
    names = [line.split()[0] for line in listed if line.strip()]
    dead = [name for name in names if (pid := owner_pid(name)) and not _process_lives(pid)]
    remove(dead, [["ip", "netns", "delete", name] for name in dead])
    return dead


def _process_lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def remove(namespaces: Sequence[str], commands: Sequence[list[str]]) -> None:
    """Kill all processes in ``namespaces`` and run all ``commands``; then report the failures."""
    for name in namespaces:
        _kill_all_in(name)
    failures = []
    for command in commands:
        # A cluster that failed while it was built lacks some of its namespaces.
        if Path("/run/netns", command[-1]).exists():
            try:
                call(command)
            except ClusterError as error:
                failures.append(str(error))
    if failures:
        raise ClusterError("\n".join(failures))


def _kill_all_in(namespace: str) -> None:
    """Kill the processes in a namespace of ours; all of them descend from ranks that we started."""
    with suppress(ClusterError):
        for pid in call(["ip", "netns", "pids", namespace]).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def call(command: Sequence[str]) -> str:
    """Run one ``ip`` or ``tc`` command and return what it printed.

    The command runs in a session of its own, so that Ctrl-C at the terminal does not interrupt it.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_SECS,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{' '.join(command)}` hung for {TOOL_TIMEOUT_SECS:g} s") from None
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
