"""Process groups: those of this process, with their ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist


class KnownGroup(NamedTuple):
    """A process group: what it is for, as torch's users say it, and its ranks in the job."""

    desc: str
    ranks: tuple[int, ...]


def known_groups() -> dict[str, KnownGroup]:
    """The groups of which this process is a member, by torch's names for them.

    >>> # rv.known_groups()
    >>> # {'0': KnownGroup(desc='default_pg', ranks=(0, 1))}
    """
    if not dist.is_initialized():
        return {}
    known = dist.distributed_c10d._world
    # Groups that this process is no member of have ranks, and no name.
    return {
        name: KnownGroup(group.group_desc, tuple(sorted(known.pg_group_ranks[group])))
        for group, name in known.pg_names.items()
    }
