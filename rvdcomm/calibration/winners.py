"""Winners: the fastest recipe of every request, in this process and in a file of the user's.

The file is ``$XDG_CACHE_HOME/rvdcomm/tune.json``, or below ``~/.cache``. It is a cache: a damaged
file is ignored with a warning and replaced, and a file that cannot be written is a warning too.
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
from math import prod
from pathlib import Path as FilePath
from typing import Any

from rvdcomm import LayoutError, Plan
from rvdcomm.json_file import entry, read_json, write_json
from rvdcomm.layout import ITEM_BYTES, ranges_text

FILE_VERSION = 1
MAX_FILE_BYTES = 8 << 20
MAX_NAME_LENGTH = 64
MAX_ENTRIES = 4096
"""In the file and in the table; the oldest entries are dropped first."""

log = logging.getLogger("rvdcomm.calibration")


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
            LayoutError: a value is missing or of another type.
        """
        if len(entry(values, "recipe", str)) > MAX_NAME_LENGTH:
            raise LayoutError(f"a recipe's name is longer than {MAX_NAME_LENGTH} characters")
        return cls(
            entry(values, "recipe", str),
            entry(values, "executor", str),
            entry(values, "secs", float),
            entry(values, "model_secs", float),
        )


def key_of(model: Plan, memory_limit: int | None, where: str) -> str:
    """The key of a request: equal keys share a winner; ``where`` names world and release.

    Sizes count by their power of two. Ragged pairs have keys of their own, because they are planned
    in another way.
    """
    src, dst = (
        f"{layout.rvd} on {ranges_text(layout.ranks)}{'' if layout.is_even else ' ragged'}"
        for layout in (model.src, model.dst)
    )
    text = json.dumps(model.topology.to_json(), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    limit = "" if memory_limit is None else f" within {memory_limit}"
    size = (ITEM_BYTES[model.dtype] * prod(model.src.shape)).bit_length()
    return f"{src} -> {dst} {model.dtype} 2^{size}{limit} topology {digest} {where}"


class Winners:
    """A bounded table over a file; the file is read for a key that is not in the table."""

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
                # The ranks of a host all write the same entry.
                entries = _read(path)
                if entries.get(key) != winner:
                    entries.pop(key, None)
                    entries[key] = winner
                    kept = list(entries.items())[-MAX_ENTRIES:]
                    write_json(path, _to_json(dict(kept)))
        except OSError as error:
            log.warning("cannot remember the fastest plans in %s: %s", path, error)

    def clear(self) -> None:
        """Forget the entries of this process; the file stays."""
        self._known.clear()

    def _remember(self, key: str, winner: Winner) -> None:
        self._known[key] = winner
        while len(self._known) > MAX_ENTRIES:
            self._known.popitem(last=False)


def cache_file() -> FilePath:
    """The file that keeps the winners."""
    home = os.environ.get("XDG_CACHE_HOME") or FilePath.home() / ".cache"
    return FilePath(home, "rvdcomm", "tune.json")


def _to_json(entries: dict[str, Winner]) -> dict[str, Any]:
    return {"version": FILE_VERSION, "entries": {k: asdict(w) for k, w in entries.items()}}


def _read(path: FilePath) -> dict[str, Winner]:
    """The entries of the file; none if it is damaged."""
    try:
        values = read_json(path, MAX_FILE_BYTES)
        if entry(values, "version", int) != FILE_VERSION:
            raise LayoutError(f"its version is not {FILE_VERSION}")
        entries = entry(values, "entries", dict)
        return {key: Winner.from_json(found) for key, found in entries.items()}
    except FileNotFoundError:
        return {}
    except (LayoutError, OSError) as error:
        log.warning("ignoring %s, which will be replaced: %s", path, error)
        return {}


@contextmanager
def _locked(path: FilePath) -> Iterator[None]:
    """Hold the lock of the file, so that no other process writes between a read and a write."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
