"""Numbers for people, in units that keep them short."""

from __future__ import annotations

_POWERS = {"": 0, "B": 0, "KIB": 1, "MIB": 2, "GIB": 3, "TIB": 4}


def bytes_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that is not above them.

    >>> bytes_text(3 * 1024 * 1024), bytes_text(1536)
    ('3 MiB', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        # What four digits would round up to 1024 is one of the next unit.
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
    number = text.strip().rstrip("BKMGTiIbkmgt").strip()
    unit = text.strip()[len(number) :].strip().upper()
    try:
        return int(float(number) * 1024 ** _POWERS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"cannot parse bytes {text!r}: expected a form such as '32GiB', '512MiB' or '1e6'."
        ) from None
