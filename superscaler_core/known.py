"""Known: a bounded cache for results, keyed by everything that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_STORING = Lock()
"""Held while an entry is stored and an old one dropped, not while a result is computed."""


class Known(dict[K, V]):
    """A dict with a bounded number of entries; when it is full, the oldest entry is dropped.

    Threads may share it: they all get the result that was stored first.

    Args:
        most: largest number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The result for a key; it is made if there is none.

        >>> Known(2).of("key", lambda: 7)
        7
        """
        try:
            return self[key]
        except KeyError:
            made = make()
        with _STORING:
            found = self.setdefault(key, made)
            self._drop()
        return found

    def __setitem__(self, key: K, value: V) -> None:
        with _STORING:
            super().__setitem__(key, value)
            self._drop()

    def _drop(self) -> None:
        if len(self) > self._most:
            # A dict keeps its keys in the order of insertion.
            del self[next(iter(self))]
