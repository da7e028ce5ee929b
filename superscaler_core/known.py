"""Known: a bounded cache for results, keyed by everything that they depend on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Known(dict[K, V]):
    """A dict with a bounded number of entries; when it is full, the oldest entry is dropped.

    Args:
        most: largest number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            # A dict keeps its keys in the order of insertion.
            del self[next(iter(self))]
