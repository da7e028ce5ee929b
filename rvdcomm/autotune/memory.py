"""Memory: the fastest recipes by what was asked for, in this process and in a file of the user's.

The file is ``$XDG_CACHE_HOME/rvdcomm/autotune.json``, or below ``~/.cache``. It is a cache: what is
wrong with it is said in the log, and it is written anew; that it cannot be written is no error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

from rvdcomm.errors import LayoutError
from rvdcomm.json_file import entry, read_json, write_json
from rvdcomm.layout import Layout, Topology, ranges_text

FILE_VERSION = 1
MAX_FILE_BYTES = 8 << 20
MAX_NAME_LENGTH = 64
MAX_ENTRIES = 4096
"""In the file and in the table; of more, those that were written first are forgotten."""

log = logging.getLogger("rvdcomm.autotune")


@dataclass(frozen=True, slots=True)
class Winner:
    """A recipe with its executor, and what was measured."""

    recipe: str
    executor: str
    secs: float
    model_secs: float

    @classmethod
    def from_json(cls, values: Any) -> Winner:
        """Check plain values.

        Raises:
            LayoutError: they are no winner.
        """
        if len(entry(values, "recipe", str)) > MAX_NAME_LENGTH:
            raise LayoutError(f"a recipe's name is longer than {MAX_NAME_LENGTH} characters")
        return cls(
            entry(values, "recipe", str),
            entry(values, "executor", str),
            entry(values, "secs", float),
            entry(values, "model_secs", float),
        )


def key_of(
    src: Layout,
    dst: Layout,
    dtype: str,
    num_bytes: int,
    topology: Topology,
    memory_limit: int | None,
    where: str,
) -> str:
    """What tensors must have in common to share a winner; ``where`` names world and release.

    Sizes count by their power of two, and by whether they can be cut evenly: ragged pairs are
    planned in another way.
    """
    ends = [
        f"{layout.rvd} on {ranges_text(layout.ranks)}{'' if layout.is_even else ' ragged'}"
        for layout in (src, dst)
    ]
    text = json.dumps(topology.to_json(), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    limit = "" if memory_limit is None else f" within {memory_limit}"
    size = f"2^{num_bytes.bit_length()}"
    return f"{ends[0]} -> {ends[1]} {dtype} {size}{limit} topology {digest} {where}"


class Memory:
    """A bounded table over a file; the file is read when something is not in the table."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Winner] = OrderedDict()

    def get(self, key: str) -> Winner | None:
        """The winner of a key."""
        if key not in self._known:
            values = _read(cache_file()).get(key)
            if values is not None:
                self._remember(key, values)
        return self._known.get(key)

    def put(self, key: str, winner: Winner) -> None:
        """Remember a winner, here and in the file."""
        self._remember(key, winner)
        path = cache_file()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path):
                # All ranks of a host come by with the same.
                entries = _read(path)
                if entries.get(key) != winner:
                    entries.pop(key, None)
                    entries[key] = winner
                    kept = list(entries.items())[-MAX_ENTRIES:]
                    write_json(path, _to_json(dict(kept)))
        except OSError as error:
            log.warning("cannot remember the fastest plans in %s: %s", path, error)

    def clear(self) -> None:
        """Forget what is in this process; the file stays."""
        self._known.clear()

    def _remember(self, key: str, winner: Winner) -> None:
        self._known[key] = winner
        while len(self._known) > MAX_ENTRIES:
            self._known.popitem(last=False)


def cache_file() -> FilePath:
    """Where winners are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or FilePath.home() / ".cache"
    return FilePath(home, "rvdcomm", "autotune.json")


def _to_json(entries: dict[str, Winner]) -> dict[str, Any]:
    return {"version": FILE_VERSION, "entries": {k: asdict(w) for k, w in entries.items()}}


def _read(path: FilePath) -> dict[str, Winner]:
    """What the file says; nothing if it says nothing sensible."""
    try:
        values = read_json(path, MAX_FILE_BYTES)
        if entry(values, "version", int) != FILE_VERSION:
            raise LayoutError(f"it is of another version than {FILE_VERSION}")
        entries = entry(values, "entries", dict)
        return {key: Winner.from_json(found) for key, found in entries.items()}
    except FileNotFoundError:
        return {}
    except (LayoutError, OSError) as error:
        log.warning("ignoring %s, which will be written anew: %s", path, error)
        return {}


@contextmanager
def _locked(path: FilePath) -> Iterator[None]:
    """One process at a time between reading and writing."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
