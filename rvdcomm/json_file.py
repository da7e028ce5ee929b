"""JSON files: read in bounded time and memory, whoever wrote them; written in full or not at all.

The contents of a file are not trusted: ``read_json`` bounds its size, ``entry`` checks the type of
every value that is taken from it.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path as FilePath
from typing import Any, NoReturn, TypeVar

from rvdcomm.errors import LayoutError
from rvdcomm.text import quoted
from rvdcomm.whole_file import write_whole

_Type = TypeVar("_Type")

_NAMES: dict[type, str] = {
    bool: "a truth value",
    dict: "an object",
    float: "a finite number",
    int: "an integer",
    list: "a list",
    str: "a text",
}


def read_json(path: str | FilePath, max_bytes: int) -> Any:
    """The value of a JSON file.

    Raises:
        LayoutError: it is longer than ``max_bytes``, not UTF-8, not JSON, nested too deeply, or has
            a NaN, an infinity or an integer of thousands of digits.
        OSError: it cannot be read.
    """
    return parse_json(read_bounded(path, max_bytes))


def parse_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        LayoutError: it is no UTF-8, no JSON, nested too deeply, or has a NaN, an infinity or an
            integer of thousands of digits.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise LayoutError("it is nested too deeply") from None
    except ValueError as error:
        # ValueError covers UnicodeDecodeError, JSONDecodeError and integers beyond Python's limit.
        raise LayoutError(f"it is no JSON: {error}") from None


def read_bounded(path: str | FilePath, max_bytes: int) -> bytes:
    """The bytes of a file; a pipe that no process writes to counts as an empty file.

    Raises:
        LayoutError: it is longer than ``max_bytes``.
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=_at_once) as file:
        os.set_blocking(file.fileno(), True)
        # One byte more than allowed, so that an endless file (a device, a pipe) is refused too.
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise LayoutError(f"it is longer than {max_bytes} bytes")
    return data


def write_json(path: str | FilePath, value: Any) -> None:
    """Write a JSON file: readers see the old one or the new one, never a part.

    Raises:
        LayoutError: the value has a NaN or an infinity, which JSON cannot express.
        OSError: the file cannot be written; a file that was there is as before.
    """
    try:
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    except ValueError as error:
        raise LayoutError(f"{path} cannot be written: {error}.") from None
    write_whole(path, text)


def entry(values: Any, name: str, kind: type[_Type]) -> _Type:
    """``values[name]``, of type ``kind``; an integer is a float, too.

    >>> entry({"secs": 3}, "secs", float)
    3.0

    Raises:
        LayoutError: ``values`` is no object, has no such entry, or one of another type.
    """
    if not isinstance(values, dict):
        raise LayoutError(f"expected an object with {name!r}, got {quoted(values)}")
    if name not in values:
        raise LayoutError(f"{name!r} is missing")
    found = values[name]
    if kind is float and type(found) is int:
        with suppress(OverflowError):
            found = float(found)
    # Exact types: True is not accepted as a number.
    if type(found) is not kind or (isinstance(found, float) and not math.isfinite(found)):
        raise LayoutError(f"{name!r} must be {_NAMES[kind]}, got {quoted(found)}")
    return found


def _at_once(path: str, flags: int) -> int:
    """Open a file; without O_NONBLOCK, opening a pipe waits for a writer, forever if none comes."""
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
