"""Agreement: before the first byte of a new transition, all ranks see all ranks' requests.

Each rank posts what it was asked for in the job's store and reads what the others posted. From the
same posts every rank draws the same conclusion: one plan, or one error that names who is wrong. It
costs some round trips to the store, once a transition; later calls find the conclusion in a table.
"""

from __future__ import annotations

import json
from typing import Any

from rvdcomm.errors import CommError, LayoutError
from rvdcomm.layout import ranges_text
from rvdcomm.run.world import World
from rvdcomm.text import quoted

Post = dict[str, Any]


def exchange_posts(
    world: World, members: tuple[int, ...], post: Post, what: str
) -> dict[int, Post]:
    """Every member's post, by rank; collective over ``members``; ``what`` names it in errors.

    The n-th agreement of the same members uses keys of its own. One that fails is taken back, so
    that the ranks count alike when they try again.

    Raises:
        CommError: some members did not post within the group's timeout; names them. Or what a
            member posted cannot be read; on all of them.
    """
    number = world.num_agreements.get(members, 0)
    prefix = f"rvdcomm/posts/{world.name}/{ranges_text(members)}"
    keys = {rank: f"{prefix}/{number}/{rank}" for rank in members}
    store = world.store
    try:
        store.delete_key(_tried(keys[world.rank]))
        store.set(keys[world.rank], json.dumps(post))
        store.wait(list(keys.values()), world.timeout)
        found = {rank: store.get(key) for rank, key in keys.items()}
        # Who has posted this time has read what was posted the time before.
        if number:
            store.delete_key(f"{prefix}/{number - 1}/{world.rank}")
    except RuntimeError as error:
        missing = _take_back(world, keys)
        raise CommError(
            f"{what}: ranks {missing} did not join within {world.timeout.total_seconds():g} s. "
            "They may be in another call, or think that this transition has other ranks "
            f"({error.__class__.__name__})."
        ) from None
    world.num_agreements[members] = number + 1
    posts = {}
    for rank, data in found.items():
        try:
            posts[rank] = read_post(data)
        except ValueError as error:
            raise CommError(
                f"{what}: what rank {rank} posted cannot be read ({error}). Do all ranks run one "
                "version of rvdcomm?"
            ) from None
    return posts


def compare_requests(
    world: World, members: tuple[int, ...], asked: Post, what: str, **own: Any
) -> dict[int, Post]:
    """Every member's post ``{**asked, **own}``, where ``asked`` must be equal on all members.

    Raises:
        LayoutError: it is not; on all members, and names two that differ.
        CommError: as in ``exchange_posts``.
    """
    posts = exchange_posts(world, members, {**asked, **own}, what)
    first = min(posts)
    for rank, post in posts.items():
        for name in asked:
            if post.get(name) != posts[first].get(name):
                raise LayoutError(
                    f"{what}: ranks disagree about {name}: rank {first} asks for "
                    f"{quoted(posts[first].get(name))}, rank {rank} for {quoted(post.get(name))}; "
                    "all ranks must ask for the same."
                )
    return posts


def read_post(data: bytes) -> Post:
    """The JSON object that another process sent: plain values, whatever it did send.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        found = json.loads(data)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object, or too deep a one")
    return found


def _take_back(world: World, keys: dict[int, str]) -> list[int] | str:
    """Delete this rank's post; name the ranks that never posted, if the store still answers."""
    store = world.store
    try:
        # Others may have given up and taken theirs back a moment ago: those did join.
        store.set(_tried(keys[world.rank]), "")
        missing = [
            rank
            for rank, key in keys.items()
            if not store.check([key]) and not store.check([_tried(key)])
        ]
        store.delete_key(keys[world.rank])
    except RuntimeError:
        return "that serve the store, or others,"
    return missing


def _tried(key: str) -> str:
    """The key that says that a rank posted and took its post back."""
    return f"{key}/tried"
