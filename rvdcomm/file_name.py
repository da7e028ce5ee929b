"""File names: names of temporary files and folders, short enough for every file system."""

from __future__ import annotations

import hashlib
import os

_MAX_BYTES = 120
"""Linux takes names of 255 bytes, file systems that encrypt names take 143; a suffix that the
caller's own suffix gets (".tmp", say) fits, too."""

_KEPT_BYTES = 40


def beside(name: str, suffix: str) -> str:
    """The hidden name of a temporary file or folder that is made in the folder of ``name``.

    Laws (tests/test_file_name.py): it takes up to 120 bytes if the suffix takes up to 60, however
    long ``name`` is; it ends with the suffix; different names give different temporary names.

    Args:
        name: the name of a file or folder, without its path.
        suffix: says what the temporary file is, such as ``".partial"``.

    >>> beside("step-9", ".shards")
    '.step-9.shards'
    """
    whole = f".{name}{suffix}"
    data = os.fsencode(name)
    if len(os.fsencode(whole)) <= _MAX_BYTES and "~" not in name:
        return whole
    kept = data[:_KEPT_BYTES].decode("utf-8", "ignore")
    return f".{kept}~{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
