"""Abort and restart: what a program does with a group when one of its ranks cannot go on."""

from __future__ import annotations

from typing import Any

from rvdcomm.api.pending import drain
from rvdcomm.run.agree import exchange_posts
from rvdcomm.run.world import World


def abort(error: BaseException, group: Any = None) -> None:
    """Break a group on all of its ranks, because this rank will not make the calls that they make.

    A rank that fails between two calls on which others rely, and goes on, would send them data of
    other calls than theirs. After ``abort`` every call on this rank raises ``CommError``. Ranks
    that wait for this one learn it at once, the others in their next call with it. ``restart``
    forms the connections again.

    >>> # try: loss = forward(batch)                    # between two collective calls
    >>> # except Exception as error: rv.abort(error); raise

    Args:
        error: what happened; its text is in the errors of all ranks.
        group: process group; the default group if None.

    Raises:
        CommError: this rank is not in the group.
    """
    World.of(group).fail(error)


def restart(group: Any = None, *, text: str = "") -> list[str]:
    """Form the connections of a group again after a failure; collective over all of its ranks.

    Ranks meet in the group's store, which has to work still, and the processes have to be alive.
    torch's own group stays as it is. Handles and ``Redistributor``s of before stay broken; make new
    ones. All other calls plan and connect as at first.

    Args:
        group: process group; the default group if None.
        text: what this rank tells the others, such as its error.

    Returns:
        The texts of all ranks, in their order.

    Raises:
        CommError: a rank did not come within the group's timeout; the group is broken then.
    """
    World.of(group).fail(RuntimeError("the group was restarted"))
    drain()
    world = World.renewed(group)
    members = tuple(range(world.size))
    with world.together(members):
        posts = exchange_posts(world, members, {"text": text}, "restart")
    return [post["text"] for _, post in sorted(posts.items())]
