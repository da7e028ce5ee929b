"""Tests of ``bench.cluster.cleanup``: a child process registers an undo function and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A background job of a shell inherits an ignored SIGINT, so the child sets the default handler.
PRELUDE = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from bench.cluster import cleanup
def undo():
    cleanup.unregister(undo)
    print("undone", flush=True)
"""


def run_child(body: str) -> tuple[int, list[str]]:
    """Run ``body`` after the prelude; return its exit status and the lines it printed."""
    command = [sys.executable, "-c", PRELUDE + body]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=20
    )
    return done.returncode, done.stdout.splitlines()


def raised(signum: str) -> str:
    return f"cleanup.register(undo)\nsignal.raise_signal(signal.{signum})\nprint('not reached')"


def test_undo_runs_at_the_end_of_the_program() -> None:
    assert run_child("cleanup.register(undo)") == (0, ["undone"])


def test_undo_runs_after_an_exception() -> None:
    assert run_child("cleanup.register(undo)\n1 / 0") == (1, ["undone"])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_undo_runs_when_a_signal_ends_the_program(name: str) -> None:
    status = 128 + signal.Signals[name]
    assert run_child(raised(name)) == (status, ["undone"])


def test_undo_runs_on_ctrl_c() -> None:
    assert run_child(raised("SIGINT")) == (-signal.SIGINT, ["undone"])


def test_finally_blocks_run_on_sigterm() -> None:
    body = """
cleanup.register(undo)
try:
    signal.raise_signal(signal.SIGTERM)
finally:
    print("finally")
"""
    assert run_child(body)[1] == ["finally", "undone"]


def test_shield_delays_a_signal_until_its_outermost_block_ends() -> None:
    body = """
cleanup.register(undo)
with cleanup.shielded():
    with cleanup.shielded():
        signal.raise_signal(signal.SIGTERM)
    print("inside")
print("not reached")
"""
    assert run_child(body) == (128 + signal.SIGTERM, ["inside", "undone"])


def test_ignored_signal_stays_ignored() -> None:
    body = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
cleanup.register(undo)
signal.raise_signal(signal.SIGHUP)
print("still here")
"""
    assert run_child(body) == (0, ["still here", "undone"])


def test_existing_signal_handler_is_called_and_restored() -> None:
    body = """
mine = lambda signum, frame: print("mine")
signal.signal(signal.SIGTERM, mine)
cleanup.register(undo)
signal.raise_signal(signal.SIGTERM)
undo()
assert signal.getsignal(signal.SIGTERM) is mine
"""
    assert run_child(body) == (0, ["mine", "undone"])


def test_signal_handlers_stay_installed_while_an_undo_is_registered() -> None:
    body = """
other = lambda: print("other")
cleanup.register(undo)
cleanup.register(other)
undo()
signal.raise_signal(signal.SIGTERM)
"""
    assert run_child(body) == (128 + signal.SIGTERM, ["undone", "other"])


def test_forked_child_does_not_run_its_parents_undo() -> None:
    body = """
cleanup.register(undo)
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
print("child ended", flush=True)
"""
    assert run_child(body) == (0, ["child ended", "undone"])


def test_undo_can_be_registered_from_another_thread() -> None:
    body = """
import threading
thread = threading.Thread(target=cleanup.register, args=(undo,))
thread.start()
thread.join()
with cleanup.shielded():
    pass
"""
    assert run_child(body) == (0, ["undone"])
