"""The meeting of trainers and workers: they tell each other what they have and need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rvdcomm import CommError, LayoutError
from rvdcomm.interop.vllm.held import Held
from rvdcomm.interop.vllm.joint import Joint
from rvdcomm.interop.vllm.record import TensorMeta
from rvdcomm.interop.vllm.transfer import (
    Need,
    Offer,
    Transfer,
    needs_of,
    offers_of,
    said_needs,
    said_offers,
)
from rvdcomm.run import compare_requests, exchange_posts

Needs = Mapping[str, Need]


def meet(
    joint: Joint,
    held: Mapping[str, Held] | None,
    needs: Callable[[Mapping[str, TensorMeta]], Needs] | None,
    *,
    is_open: bool = False,
) -> tuple[Transfer, bool]:
    """What moves in every update; collective over the joint group.

    Args:
        joint: the group.
        held: what this rank has, if it is a trainer.
        needs: says what this rank needs of the tensors of trainers, if it is a worker.
        is_open: whether this rank is a worker whose update an earlier trainer left open.

    Returns:
        The transfer, and whether any worker's update is open.

    Raises:
        LayoutError: trainers disagree about a tensor, or a worker cannot take one; on all ranks.
        CommError: a rank did not come, or failed.
    """
    said = exchange_posts(
        joint.world,
        joint.everybody,
        {"offers": None if held is None else said_offers(held)},
        "trainers say what they have",
    )
    fault: LayoutError | None = None
    own: Mapping[str, Any] | None = None
    offers: dict[str, Offer] = {}
    try:
        offers = offers_of(said[rank]["offers"] for rank in joint.trainers)
        if needs is not None:
            own = said_needs(needs({name: offer.meta for name, offer in offers.items()}))
    except LayoutError as error:
        fault = error
    except Exception as error:  # Of a loader of the engine: all ranks have to hear of it.
        fault = LayoutError(f"rank {joint.rank}: {type(error).__name__}: {error}")
    posts = compare_requests(
        joint.world,
        joint.everybody,
        {},
        "workers say what they need",
        fault=fault,
        needs=own,
        open=is_open,
    )
    needed = {rank: needs_of(posts[rank]["needs"]) for rank in joint.workers}
    return Transfer(offers, needed), any(post["open"] for post in posts.values())


def begin_together(joint: Joint, number: int, fault: LayoutError | None) -> None:
    """Tell all ranks whether this one can take part in an update; collective over the joint group.

    Raises:
        LayoutError: a rank cannot; the same on all ranks, which may try again.
        CommError: a rank failed.
    """
    compare_requests(joint.world, joint.everybody, {}, f"the begin of update {number}", fault=fault)


def end_together(joint: Joint, number: int, error: Exception | None) -> None:
    """Tell all ranks that this one has all of an update; collective over the joint group.

    Raises:
        CommError: this rank or another one failed.
    """
    if error is not None:
        joint.world.fail(error)
        raise CommError(f"update {number}: {type(error).__name__}: {error}") from error
    exchange_posts(joint.world, joint.everybody, {}, f"the end of update {number}")
