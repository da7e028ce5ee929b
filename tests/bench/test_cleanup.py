"""Tests of ``bench.cluster.cleanup``: a child process registers an undo function and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A background job of a shell inherits an ignored SIGINT, so the child sets the default handler.
PRELUDE = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from bench.cluster import cleanup
def undo():
    cleanup.unregister(undo)
    print("undone", flush=True)
"""
BY_SIGTERM = 128 + signal.SIGTERM
CASES = {
    "end of the program": ("cleanup.register(undo)", 0, ["undone"]),
    "an exception": ("cleanup.register(undo)\n1 / 0", 1, ["undone"]),
    "SIGHUP": (
        "cleanup.register(undo)\nsignal.raise_signal(signal.SIGHUP)\nprint('not reached')",
        128 + signal.SIGHUP,
        ["undone"],
    ),
    "ctrl-c": (
        "cleanup.register(undo)\nsignal.raise_signal(signal.SIGINT)\nprint('not reached')",
        -signal.SIGINT,
        ["undone"],
    ),
    "SIGTERM, after finally blocks": (
        """
        cleanup.register(undo)
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            print("finally")
        """,
        BY_SIGTERM,
        ["finally", "undone"],
    ),
    "end of the outermost shield": (
        """
        cleanup.register(undo)
        with cleanup.shielded():
            with cleanup.shielded():
                signal.raise_signal(signal.SIGTERM)
            print("inside")
        print("not reached")
        """,
        BY_SIGTERM,
        ["inside", "undone"],
    ),
    "an ignored signal": (
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        cleanup.register(undo)
        signal.raise_signal(signal.SIGHUP)
        print("still here")
        """,
        0,
        ["still here", "undone"],
    ),
    "a handler of the program": (
        """
        mine = lambda signum, frame: print("mine")
        signal.signal(signal.SIGTERM, mine)
        cleanup.register(undo)
        signal.raise_signal(signal.SIGTERM)
        undo()
        assert signal.getsignal(signal.SIGTERM) is mine
        """,
        0,
        ["mine", "undone"],
    ),
    "two undos": (
        """
        cleanup.register(undo)
        cleanup.register(lambda: print("other"))
        undo()
        signal.raise_signal(signal.SIGTERM)
        """,
        BY_SIGTERM,
        ["undone", "other"],
    ),
    "a fork, in the parent alone": (
        """
        cleanup.register(undo)
        child = os.fork()
        if not child:
            sys.exit(0)
        os.waitpid(child, 0)
        print("child ended", flush=True)
        """,
        0,
        ["child ended", "undone"],
    ),
    "another thread": (
        """
        thread = threading.Thread(target=cleanup.register, args=(undo,))
        thread.start()
        thread.join()
        with cleanup.shielded():
            pass
        """,
        0,
        ["undone"],
    ),
}
"""What the child does; its exit status, and the lines that it prints."""


@pytest.mark.parametrize("case", CASES)
def test_undo_runs_once_after(case: str) -> None:
    body, status, lines = CASES[case]
    command = [sys.executable, "-c", PRELUDE + dedent(body)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.splitlines()) == (status, lines)
