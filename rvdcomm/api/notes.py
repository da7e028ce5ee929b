"""Notes: what ranks of a group leave for each other to read after a failure."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from rvdcomm.run.agree import GRACE_SECS, bounded
from rvdcomm.run.world import World

_STORES: weakref.WeakKeyDictionary[World, Any] = weakref.WeakKeyDictionary()
"""A connection of each world that only notes use: after a failure an operation may block others."""


def tell(text: str, group: Any = None) -> None:
    """Leave a text for the other ranks of a group, in place of the one before.

    It costs some microseconds and waits for nobody, so a rank can say before every call what it is
    about to do. If the store is lost, nothing happens: there is nobody to tell.

    >>> # rv.tell("step 12 begins")

    Args:
        text: what others read.
        group: process group; the default group if None.

    Raises:
        CommError: this rank is not in the group.
    """
    world = World.of(group)
    with suppress(RuntimeError):
        _store(world).set(_key(world.rank), text)


def told(group: Any = None, *, timeout_secs: float = GRACE_SECS) -> dict[int, str]:
    """The last text of every rank of a group that left one, also after a failure of the group.

    No other rank has to call it.

    >>> # rv.told()
    >>> # {0: 'step 12 begins', 1: 'step 11 begins'}

    Args:
        group: process group; the default group if None.
        timeout_secs: how long the store may take to answer; then nothing is known.

    Raises:
        CommError: this rank is not in the group.
    """
    world = World.of(group)

    def read() -> dict[int, str]:
        store, keys = _store(world), {_key(rank): rank for rank in range(world.size)}
        if store.has_extended_api() and store.check([*keys]):
            # Two requests whatever the number of ranks, once each rank has left a text.
            return dict(enumerate(text.decode() for text in store.multi_get([*keys])))
        return {rank: store.get(key).decode() for key, rank in keys.items() if store.check([key])}

    try:
        return bounded(read, timeout_secs)
    except (RuntimeError, TimeoutError):
        return {}


def _store(world: World) -> Any:
    if world not in _STORES:
        try:
            _STORES[world] = world.member.store.clone()
        except RuntimeError:  # As of ``World.store``.
            _STORES[world] = world.member.store
    return _STORES[world]


def _key(rank: int) -> str:
    return f"rvdcomm/notes/{rank}"
