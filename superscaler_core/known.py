"""Known: a bounded cache for results, keyed by everything that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")
R = TypeVar("R")

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


def remembers(
    most: int | None = None,
) -> Callable[[Callable[Concatenate[Any, P], R]], cached_property[Callable[P, R]]]:
    """Let a method remember its last results for each object, by its arguments.

    >>> class Squares:
    ...     @remembers(1)
    ...     def of(self, number):
    ...         print("computed")
    ...         return number**2
    >>> squares = Squares()
    >>> squares.of(3) + squares.of(3)
    computed
    18

    Args:
        most: largest number of results; no bound if None.
    """

    def remembering(method: Callable[Concatenate[Any, P], R]) -> cached_property[Callable[P, R]]:
        def of(self: Any) -> Callable[P, R]:
            found: Any = lru_cache(maxsize=most)(partial(method, self))
            remembered: Callable[P, R] = found
            return remembered

        of.__doc__ = method.__doc__
        return cached_property(of)

    return remembering


@dataclass(frozen=True, slots=True)
class ByKey(Generic[V]):
    """An argument of a remembering function that is compared by ``key``, not by its value."""

    key: Hashable
    value: V = field(compare=False)
