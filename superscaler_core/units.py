"""Bytes and seconds as short texts with units."""

from __future__ import annotations

import re
from fractions import Fraction

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BYTES = re.compile(r"(\d{1,30}(?:\.\d{1,30})?(?:[eE]\d{1,2})?) ?(?:(?i:([KMGT])i)?(?i:B))?")


def bytes_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that does not exceed them.

    >>> bytes_text(3 * 1024 * 1024), bytes_text(1536)
    ('3 MiB', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        # A number that rounds to 1024 in four digits is written in the next unit.
        if abs(num_bytes) < 1023.5:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    >>> parse_bytes("32GiB") == 32 * 2**30, parse_bytes("1.5 KiB"), parse_bytes("1e6")
    (True, 1536, 1000000)

    Raises:
        ValueError: the text has another form.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"cannot parse bytes {text[:80]!r}: expected a form such as '32GiB', '512MiB' or '1e6'."
        )
    return int(Fraction(found[1]) * 1024 ** _POWERS[(found[2] or "").upper()])


def secs_text(secs: float) -> str:
    """Seconds in a unit that keeps the number readable.

    >>> secs_text(0.00125), secs_text(0)
    ('1.25 ms', '0 s')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(secs) >= scale:
            return f"{secs / scale:.4g} {unit}"
    return f"{secs / 1e-9:.4g} ns" if secs else "0 s"
