"""Agreement: before the first byte of a new transition, all ranks see all ranks' requests.

Each rank posts what it was asked for in the job's store and reads what the others posted. From the
same posts every rank draws the same conclusion: one plan, or one error that names who is wrong. It
costs some round trips to the store, once a transition; later calls find the conclusion in a table.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from rvdcomm.errors import CommError
from rvdcomm.executors.world import World
from rvdcomm.layout import ranges_text

Post = dict[str, Any]


def exchange_posts(
    world: World, members: tuple[int, ...], post: Post, what: str
) -> dict[int, Post]:
    """Every member's post, by rank; collective over ``members``; ``what`` names it in errors.

    Raises:
        CommError: some members did not post within the group's timeout; names them.
    """
    number = world.num_agreements.get(members, 0)
    world.num_agreements[members] = number + 1
    store, names = world.store, ranges_text(members)
    keys = {rank: f"rvdcomm/posts/{world.name}/{names}/{number}/{rank}" for rank in members}
    store.set(keys[world.rank], json.dumps(post))
    _wait(world, keys, what)
    return {rank: json.loads(store.get(keys[rank])) for rank in members}


def _wait(world: World, keys: dict[int, str], what: str) -> None:
    """Wait for all posts, or name the ranks whose post is missing."""
    try:
        world.store.wait(list(keys.values()), world.timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        missing = [rank for rank, key in keys.items() if not world.store.check([key])]
        raise CommError(
            f"{what}: ranks {missing} did not join within "
            f"{world.timeout.total_seconds():g} s. They may be in another call, or think that this "
            f"transition has other ranks ({error.__class__.__name__})."
        ) from None
