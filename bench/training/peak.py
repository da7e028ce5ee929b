"""Peak: the peak memory of this process, as the kernel counts it (Linux)."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESTART = "5"
"""The value that resets the kernel's peak counter (proc(5))."""


def restart_peak() -> int:
    """Return free memory to the system and reset the peak; returns the resident bytes now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text(_RESTART)
    return _bytes_of("VmRSS")


def peak_bytes() -> int:
    """The peak of resident bytes since ``restart_peak``; shared memory counts in every rank."""
    return _bytes_of("VmHWM")


def _bytes_of(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, "Linux tells it"
    return int(found[1]) << 10
