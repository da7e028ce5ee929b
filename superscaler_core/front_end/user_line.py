"""User lines: which line of the user's own code led to an error of a capture."""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

import torch

_STDLIB = sysconfig.get_path("stdlib")
_INSIDE = (*(str(Path(file).parent) for file in (torch.__file__, __file__)), "<")
"""Beginnings of the paths of the code of torch and of the capture."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def line_of_error(at: TracebackType | None) -> str:
    """The user's innermost line in a traceback; empty if there is none."""
    return _innermost((frame.f_code.co_filename, line) for frame, line in walk_tb(at))


def line_of_trace(text: str) -> str:
    """The user's innermost line in a stack trace that torch recorded as text; may be empty."""
    return _innermost((m["file"], int(m["line"])) for m in _FRAME.finditer(text))


def _innermost(frames: Iterable[tuple[str, int]]) -> str:
    users = [(file, line) for file, line in frames if not _is_inside(file)]
    if not users:
        return ""
    file, line = users[-1]
    code = linecache.getline(file, line).strip()
    return f" ({Path(file).name}:{line}: {code})"


def _is_inside(file: str) -> bool:
    is_stdlib = file.startswith(_STDLIB) and "-packages" not in file
    return is_stdlib or file.startswith(_INSIDE)
