"""Known: what was found before, by what it depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Known(dict[K, V]):
    """A table that forgets what came first when it has too much.

    Args:
        most: entries that it keeps.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            # Dicts keep the order in which keys came.
            del self[next(iter(self))]
