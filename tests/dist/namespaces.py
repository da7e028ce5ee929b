"""Namespaces of the kernel: processes that see another network, or other folders, than the rest."""

from __future__ import annotations

import ctypes
import os
from typing import Any

CLONE_NEWNS = 0x0002_0000
CLONE_NEWNET = 0x4000_0000
MS_PRIVATE_ALL = 0x4000 | 1 << 18


def libc(function: str, *args: Any) -> None:
    """Call a function of the C library; raises OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*args) != 0:
        raise OSError(ctypes.get_errno(), function)


def may_unshare(flags: int) -> bool:
    """Whether this user may make namespaces of this kind."""
    child = os.fork()
    if child == 0:
        os._exit(ctypes.CDLL(None).unshare(flags) != 0)
    return os.waitpid(child, 0)[1] == 0


def hide(folder: str) -> None:
    """Let this process see a read-only, empty folder; only a mount may hide that of the machine."""
    libc("unshare", CLONE_NEWNS)
    libc("mount", None, b"/", None, MS_PRIVATE_ALL, None)
    libc("mount", b"none", folder.encode(), b"tmpfs", 1, b"size=4k")
