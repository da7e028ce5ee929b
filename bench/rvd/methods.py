"""The methods to run a transition that the benchmark compares; each takes this rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import rvdcomm as rv
from rvdcomm.cost import Traffic
from rvdcomm.layout import Box

Method = Callable[[Tensor | None], Tensor | None]

ITEM_BYTES = 4
"""Bytes of a float32, the element type of all cases."""


def ours(src: rv.Layout, dst: rv.Layout, topology: rv.Topology) -> Method:
    """``rvdcomm.redistribute``, called as users call it."""
    return lambda shard: rv.redistribute(shard, src, dst, topology=topology)


def pooled(shard: Tensor | None, src: rv.Layout, dst: rv.Layout, topology: rv.Topology) -> Method:
    """The same call with a source in the memory pool; ``shard`` is copied there once, untimed."""
    given = None if shard is None else rv.empty(shard.shape).copy_(shard)
    return lambda _: rv.redistribute(given, src, dst, topology=topology)


def compiled(src: rv.Layout, dst: rv.Layout, topology: rv.Topology, executor: str) -> Method | None:
    """A ``Redistributor`` that writes to memory of the caller; None if it cannot be created."""
    rank = dist.get_rank()
    if rank not in src and rank not in dst:
        return lambda shard: None
    try:
        call = rv.Redistributor(rv.plan(src, dst, "float32", topology), executor=executor)
    except rv.CommError:
        return None
    out = torch.zeros(dst.cell(rank).box.shape) if rank in dst else None
    return lambda shard: call(shard, out=out)


def memcpy(src: rv.Layout, dst: rv.Layout) -> Method:
    """The limit on one machine: all ranks together copy the bytes that must be read and written.

    Every element of every dst shard is written once and read once. If src has partial sums, each
    element is summed once, and this sum reads all its parts.
    """
    ranks = {*src.ranks, *dst.ranks}
    reads, writes = src.rvd.v + dst.rvd.r - 1, dst.rvd.r
    count = prod(src.shape) * (reads + writes) // (2 * len(ranks))
    memory = torch.zeros(2, count)

    def method(shard: Tensor | None) -> Tensor | None:
        memory[1].copy_(memory[0])
        return None

    return method


def point_to_point(src: rv.Layout, dst: rv.Layout) -> Method:
    """SuperScaler's baseline: each reader pulls the data that it needs of each part from one rank.

    If several replicas hold the data, the readers use them in turn. A reader that holds the data
    itself takes its own.
    """
    rank = dist.get_rank()
    pulls = _pulls(src, dst)

    def method(shard: Tensor | None) -> Tensor | None:
        result = None if rank not in dst else torch.zeros(dst.cell(rank).box.shape)
        requests: list[dist.Work | None] = []
        arrived = []
        for tag, (writer, reader, box) in enumerate(pulls):
            if rank == writer:
                assert shard is not None
                piece = shard[box.slices_within(src.cell(rank).box)]
                if reader == writer:
                    arrived.append((box, piece))
                else:
                    requests.append(dist.isend(piece.contiguous(), reader, tag=tag))
            elif rank == reader:
                buffer = torch.empty(box.shape)
                requests.append(dist.irecv(buffer, writer, tag=tag))
                arrived.append((box, buffer))
        for request in requests:
            if request is not None:
                request.wait()
        if result is not None:
            for box, piece in arrived:
                result[box.slices_within(dst.cell(rank).box)].add_(piece)
        return result

    return method


def _pulls(src: rv.Layout, dst: rv.Layout) -> list[tuple[int, int, Box]]:
    """(writer, reader, box) of every message, in the same order on all ranks."""
    pulls = []
    for position, reader in enumerate(dst.ranks):
        for holding in src.placement.holdings:
            common = holding.boxes[0].intersect(dst.cell(reader).box)
            if common is not None:
                own = reader in holding.ranks
                writer = reader if own else holding.ranks[position % len(holding.ranks)]
                pulls.append((writer, reader, common))
    return pulls


def point_to_point_traffic(src: rv.Layout, dst: rv.Layout, item_bytes: int) -> Traffic:
    """Bytes of the baseline from each (writer, reader) to another rank."""
    traffic: dict[tuple[int, int], int] = {}
    for writer, reader, box in _pulls(src, dst):
        if writer != reader:
            pair = writer, reader
            traffic[pair] = traffic.get(pair, 0) + item_bytes * box.num_elements
    return traffic


def dtensor(mesh: DeviceMesh, src: rv.Layout, dst: rv.Layout) -> Method | None:
    """DTensor's redistribute on a 1-D mesh; None if it cannot express the case or moves nothing."""
    if src.ranks != dst.ranks or src == dst:
        return None
    before, after = _placement(src.rvd), _placement(dst.rvd)

    def method(shard: Tensor | None) -> Tensor | None:
        assert shard is not None
        tensor = DTensor.from_local(shard, mesh, [before], run_check=False)
        return tensor.redistribute(placements=[after]).to_local()

    return method


def _placement(rvd: rv.RVD) -> Any:
    if rvd.v > 1:
        return Partial()
    if rvd.r > 1:
        return Replicate()
    return Shard(next(d for d, count in enumerate(rvd.d) if count > 1))
