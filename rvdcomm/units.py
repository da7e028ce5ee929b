"""Numbers for people: bytes and seconds in units that keep them short."""

from __future__ import annotations


def bytes_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that is not above them.

    >>> bytes_text(3 * 1024 * 1024)
    '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def secs_text(secs: float) -> str:
    """Seconds in a unit that keeps the number readable.

    >>> secs_text(0.00125)
    '1.25 ms'
    """
    if secs == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if secs >= scale:
            return f"{secs / scale:.4g} {unit}"
    return f"{secs / 1e-9:.4g} ns"
