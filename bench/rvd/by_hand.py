"""By hand: what a person writes with torch's own collectives for a case inside one group.

DTensor takes one of these ways for each pair of placements, and not always the fastest: on CPUs it
gathers where shards of one dim become shards of another (``_dispatch_shard_dim_alltoall`` in
torch/distributed/tensor/_collective_utils.py gathers and cuts there).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv

# Newer names of torch come first; the older ones warn.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Way = Callable[[Tensor], Tensor]
"""From a shard to the new shard; the shard is not modified."""


def by_hand(group: dist.ProcessGroup, src: rv.Layout, dst: rv.Layout) -> Mapping[str, Way]:
    """The ways of a transition of a matrix inside one group, by name; none if it is no such."""
    if src.ranks != dst.ranks or src == dst:
        return {}
    num, rank = dist.get_world_size(group), dist.get_rank(group)
    return {
        name: make(group, num, rank, _dim(src.rvd), _dim(dst.rvd))
        for name, make in WAYS.get((_kind(src.rvd), _kind(dst.rvd)), {}).items()
    }


def _kind(rvd: rv.RVD) -> str:
    return "V" if rvd.v > 1 else "R" if rvd.r > 1 else "D"


def _dim(rvd: rv.RVD) -> int:
    """The dim that is cut; 0 if none is."""
    return next((dim for dim, count in enumerate(rvd.d) if count > 1), 0)


Make = Callable[[dist.ProcessGroup, int, int, int, int], Way]
"""From a group, its size, this rank in it, and the dims that src and dst cut."""


def _slice(group: dist.ProcessGroup, num: int, rank: int, before: int, after: int) -> Way:
    return lambda shard: shard.chunk(num, after)[rank].clone()


def _all_reduce(group: dist.ProcessGroup, num: int, rank: int, before: int, after: int) -> Way:
    def way(shard: Tensor) -> Tensor:
        found = shard.clone()
        dist.all_reduce(found, group=group)
        return found

    return way


def _reduce_scatter(group: dist.ProcessGroup, num: int, rank: int, before: int, after: int) -> Way:
    def way(shard: Tensor) -> Tensor:
        pieces = torch.cat(shard.chunk(num, after)) if after else shard.contiguous()
        found = torch.empty_like(shard.chunk(num, after)[0], memory_format=torch.contiguous_format)
        REDUCE_SCATTER(found, pieces, group=group)
        return found

    return way


def _exchange_and_add(
    group: dist.ProcessGroup, num: int, rank: int, before: int, after: int
) -> Way:
    def way(shard: Tensor) -> Tensor:
        pieces = torch.stack(shard.chunk(num, after))
        inbox = torch.empty_like(pieces)
        dist.all_to_all_single(inbox, pieces, group=group)
        return inbox.sum(0)

    return way


def _all_gather(group: dist.ProcessGroup, num: int, rank: int, before: int, after: int) -> Way:
    def way(shard: Tensor) -> Tensor:
        inbox = shard.new_empty((num * shard.shape[0], *shard.shape[1:]))
        ALL_GATHER(inbox, shard.contiguous(), group=group)
        return torch.cat(inbox.chunk(num), before) if before else inbox

    return way


def _gather_and_cut(group: dist.ProcessGroup, num: int, rank: int, before: int, after: int) -> Way:
    gather = _all_gather(group, num, rank, before, after)
    return lambda shard: gather(shard).chunk(num, after)[rank].clone()


def _all_to_all(group: dist.ProcessGroup, num: int, rank: int, before: int, after: int) -> Way:
    def way(shard: Tensor) -> Tensor:
        pieces = torch.stack(shard.chunk(num, after))
        inbox = torch.empty_like(pieces)
        dist.all_to_all_single(inbox, pieces, group=group)
        return torch.cat(tuple(inbox), before) if before else inbox.flatten(0, 1)

    return way


WAYS: Mapping[tuple[str, str], Mapping[str, Make]] = {
    ("R", "D"): {"slice": _slice},
    ("V", "R"): {"all_reduce": _all_reduce},
    ("V", "D"): {"reduce_scatter": _reduce_scatter, "exchange and add": _exchange_and_add},
    ("D", "R"): {"all_gather": _all_gather},
    ("D", "D"): {"all_to_all": _all_to_all, "gather and cut": _gather_and_cut},
}
"""The ways by the kinds of the layouts; of several, the fastest counts."""
