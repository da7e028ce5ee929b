"""Bytes and seconds as short texts with units."""

from __future__ import annotations

import re
from fractions import Fraction

from rvdcomm.text import quoted

__all__ = ["bytes_text", "parse_bytes", "secs_text"]

_UNITS = {"": 1, "b": 1} | {
    prefix + infix + "b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
# Numbers are short, because these texts come from command lines and files.
_BYTES = re.compile(r"(\d{1,30}(?:\.\d{1,30})?(?:[eE]\d{1,2})?) ?([A-Za-z]*)")


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

    >>> parse_bytes("64MiB"), parse_bytes("1.5 KB"), parse_bytes("1e6"), parse_bytes("4096")
    (67108864, 1500, 1000000, 4096)

    Raises:
        ValueError: the text has another form.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(
            f"cannot parse bytes {quoted(text)}: expected a form such as '64MiB', '1e6' or '4096'"
        )
    return int(Fraction(found[1]) * _UNITS[found[2].lower()])


def secs_text(secs: float) -> str:
    """Seconds in a unit that keeps the number readable.

    >>> secs_text(0.00125), secs_text(0)
    ('1.25 ms', '0 s')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(secs) >= scale:
            return f"{secs / scale:.4g} {unit}"
    return f"{secs / 1e-9:.4g} ns" if secs else "0 s"
