"""Numbering: the ranks that meshes name, as ranks of the group in which tensors are moved.

A mesh names ranks of the default group of its job. The group of a call may number them otherwise:
it may hold some ranks of the job, or join ranks of several jobs, which all count from 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from rvdcomm.run import World, exchange_posts

Numbering = Mapping[int, int] | None
"""By rank in the default group of this job: the rank in the group. None: both are equal."""


def numbering_of(group: Any) -> Numbering:
    """The numbering of a group. The first call is collective over a group that joins jobs.

    Raises:
        CommError: some ranks of the group did not join.
    """
    if group is None or group is dist.group.WORLD:
        return None
    known = _ranks_in_job(group)
    if known:
        return {rank: i for i, rank in enumerate(known)}
    world = World.of(group)
    found: Numbering = world.once(("numbering",), lambda: _exchanged(world))
    return found


def _ranks_in_job(group: Any) -> list[int]:
    """The ranks of a group that was made within one job; empty if it was not."""
    with suppress(AttributeError, RuntimeError):
        for device in group._device_types:
            return list(group._get_backend(device).options.global_ranks_in_group)
    return []


def _exchanged(world: World) -> Mapping[int, int]:
    """Find out which ranks of a group are of this rank's job, and their numbers there."""
    is_in_job = dist.is_initialized()
    post = {"job": _job() if is_in_job else "", "rank": dist.get_rank() if is_in_job else 0}
    posts = exchange_posts(world, tuple(range(world.size)), post, "numbering the ranks of jobs")
    return {each["rank"]: rank for rank, each in posts.items() if each["job"] == post["job"]}


def _job() -> str:
    """A random word that all ranks of this job agree on, and no other job has."""
    store = World.of().store
    # The rank that asks first chooses. Not ``compare_set``, which file stores do not have.
    if store.add("rvdcomm/job/asked", 1) == 1:
        store.set("rvdcomm/job/word", secrets.token_hex(8))
    word: bytes = store.get("rvdcomm/job/word")
    return word.decode()
