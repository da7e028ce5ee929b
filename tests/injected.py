"""Injected faults: end a process, or fail, at its k-th call that opens or changes a file.

Python tells audit hooks about these calls. A hook cannot be removed, so a child has it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
KILLED, FAILED, DONE = 9, 3, 0
"""Exit codes of a child: killed at the call, failed with an error, or done before the call."""


def in_child(do: Callable[[], object], folder: Path, number: int, *, kill: bool) -> int:
    """Run ``do`` in a forked child; its call ``number`` for something below ``folder`` is the last.

    Args:
        do: what the child does.
        folder: only calls for this folder and what is below it count.
        number: the number of the call, from 0.
        kill: whether the child ends at the call; otherwise that call, and all writing after it,
            fail as on a full disk, and the child handles the error.

    Returns:
        ``KILLED``, ``FAILED`` or ``DONE``.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code, root, count = FAILED, os.fspath(folder), 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in EVENTS or not isinstance(args[0], str) or not args[0].startswith(root):
            return
        count += 1
        if count > number and kill:
            os._exit(KILLED)
        # On a full disk files can still be read, renamed and removed.
        is_new = event == "os.mkdir" or (event == "open" and args[2] & (os.O_CREAT | os.O_WRONLY))
        if count > number and (count == number + 1 or is_new):
            raise OSError(errno.ENOSPC, "No space left on device")

    try:
        sys.addaudithook(hook)
        do()
        code = DONE
    finally:
        os._exit(code)
