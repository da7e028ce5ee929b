"""Peak: the most memory that this process takes, as the kernel counts it (Linux)."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESTART = "5"
"""What makes the kernel forget the peak (proc(5))."""


def restart_peak() -> int:
    """Give free memory back, forget the peak, and return what is resident now, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text(_RESTART)
    return _bytes_of("VmRSS")


def peak_bytes() -> int:
    """The most that was resident since ``restart_peak``; memory that ranks share counts in each."""
    return _bytes_of("VmHWM")


def _bytes_of(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, "Linux tells it"
    return int(found[1]) << 10
