"""Routes: samples of every rank move to where a program reads them, if they are not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.codegen.table_text import sub_transfers_of
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.grouped import grouped
from superscaler_core.materialize.edges import input_sharding
from superscaler_core.materialize.sharding import Sharding, bounding
from superscaler_core.materialize.transfer import transfers
from superscaler_core.plan import Device, Plan
from superscaler_core.run.moves import move_many
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.tables import SubTransfer
from superscaler_core.run.transport import Transport

Groups = tuple[tuple[Device, ...], ...]
"""Ranks that share the work on the same samples, in the order of their first ranks."""


def groups_of(plan: Plan) -> Groups:
    """The groups of ranks among which a plan's data parallelism divides the samples.

    A rank's samples are those of its ops that compute the fewest. If the samples of ranks overlap
    without being equal, all ranks are one group.
    """
    samples = dict.fromkeys(plan.devices, (Fraction(0), Fraction(1)))
    for op in plan.graph.ops:
        for device, found in _samples_by_device(plan, op).items():
            now = samples[device]
            samples[device] = found if found[1] - found[0] < now[1] - now[0] else now
    groups = grouped((samples[device], device) for device in sorted(samples))
    ranges = sorted(groups)
    tiles = all(a[1] == b[0] for a, b in pairwise(ranges))
    if not tiles or ranges[0][0] != 0 or ranges[-1][1] != 1:
        return (tuple(sorted(samples)),)
    return tuple(map(tuple, groups.values()))


def _samples_by_device(plan: Plan, op: Op) -> dict[Device, tuple[Fraction, Fraction]]:
    """The range of a microbatch's samples for which each device computes an op."""
    found: dict[Device, tuple[Fraction, Fraction]] = {}
    for loop in plan.dims.ids(op, plan.dims.batch)[:1]:
        size = op.sizes[loop]
        for part in plan.op_split(op).parts:
            if part.device is None:
                continue
            pieces = {name: (lo, hi) for name, lo, hi in part.pieces}
            lo, hi = (Fraction(end, size) for end in pieces.get(loop, (0, size)))
            old = found.get(part.device, (lo, hi))
            found[part.device] = min(old[0], lo), max(old[1], hi)
    return found


@dataclass(frozen=True)
class _Route:
    """How one input moves: its sub-transfers, and this rank's boxes at both ends, if any."""

    sub_transfers: tuple[SubTransfer, ...]
    src: rv.Box | None
    dst: rv.Box | None


class Routes:
    """How the samples of all ranks move to where a program reads them.

    If all groups have the same number of samples, a multiple of the microbatches, then a
    microbatch has an equal share of every group's samples: a rank that computes with its own
    samples already has them. Else samples are numbered in the order of the groups.

    Args:
        plan, rank: the plan of the program, and this rank.
        groups, sizes: the groups of ranks that pass samples of their own, with their numbers.
    """

    def __init__(self, plan: Plan, groups: Groups, sizes: Sequence[int], rank: int) -> None:
        self.num, self._graph, self._rank = plan.num_microbatches, plan.graph, rank
        self._groups, self._sizes = groups, tuple(sizes)
        self._is_dealt = len({*sizes}) == 1 and sizes[0] % self.num == 0
        self._is_whole = not self._is_dealt and self.num > 1
        cut = (t for t in self._given if self._graph.samples_dim(t) is not None)
        self._routes = {tensor: self._route(plan, tensor) for tensor in cut}

    @property
    def _given(self) -> tuple[PTensor, ...]:
        found = {total.given for total in self._graph.totals}
        return tuple(t for t in self._graph.batch_inputs if t not in found)

    def moved(
        self, tensors: Sequence[Tensor], transport: Transport, device: torch.device
    ) -> dict[str, Tensor | OwnSamples]:
        """What this rank's program, on ``device``, reads of every input; collective.

        ``tensors`` are this rank's inputs, in the order of the graph's.
        """
        given = dict(zip(self._given, tensors, strict=True))
        moves = {}
        for tensor, route in self._routes.items():
            mine = [each for each in route.sub_transfers if self._rank in each.ranks]
            value = self._numbered(tensor, given[tensor]).to(device)
            moves[tensor.name] = mine, None if route.src is None else (value, route.src)
        boxes = grouped((name, (box, x)) for name, box, x in move_many(transport, moves))
        found: dict[str, Tensor | OwnSamples] = {t.name: x for t, x in given.items()}
        for tensor, route in self._routes.items():
            found[tensor.name] = self._read(tensor, route, boxes.get(tensor.name, ()), device)
        return found

    def in_rank_order(self, result: Tensor, dim: int) -> Tensor:
        """A result with samples, along ``dim``, in the order of groups and not of microbatches."""
        if not self._is_dealt or self.num == 1 or len(self._groups) == 1:
            return result
        size = self.num, len(self._groups), -1
        apart = result.reshape(*result.shape[:dim], *size, *result.shape[dim + 1 :])
        return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)

    # --- one input ------------------------------------------------------------------------------

    def _shape(self, tensor: PTensor) -> tuple[int, ...]:
        """The shape of an input of the whole step, ``[..., microbatches, samples, ...]``."""
        dim = self._dim(tensor)
        count = sum(self._sizes)
        size = (1, count) if self._is_whole else (self.num, count // self.num)
        return (*tensor.shape[:dim], *size, *tensor.shape[dim + 1 :])

    def _dim(self, tensor: PTensor) -> int:
        dim = self._graph.samples_dim(tensor)
        assert dim is not None, "it has samples"
        return dim

    def _numbered(self, tensor: PTensor, value: Tensor) -> Tensor:
        """This rank's samples, ``[..., microbatches, samples, ...]``."""
        dim, num = self._dim(tensor), 1 if self._is_whole else self.num
        size = num, value.shape[dim] // num
        return value.detach().reshape(*value.shape[:dim], *size, *value.shape[dim + 1 :])

    def _route(self, plan: Plan, tensor: PTensor) -> _Route:
        src = dict(self._brought(tensor))
        dst = dict(self._read_by(plan, tensor))
        ends = (Sharding.of((device, box, ()) for device, box in end.items()) for end in (src, dst))
        found = transfers(*ends, self._shape(tensor), tensor.dtype) if dst else ()
        return _Route(sub_transfers_of(found), src.get(self._rank), dst.get(self._rank))

    def _brought(self, tensor: PTensor) -> Iterable[tuple[Device, rv.Box]]:
        """The box of the samples that every rank passes."""
        dim, whole = self._dim(tensor), rv.Box.of_shape(self._shape(tensor))
        num = self.num if self._is_dealt else 1
        ends = [0, *accumulate(size // num for size in self._sizes)]
        for group, (start, stop) in zip(self._groups, pairwise(ends), strict=True):
            for device in group if start < stop else ():
                yield device, _along(whole, dim + 1, start, stop)

    def _read_by(self, plan: Plan, tensor: PTensor) -> Iterable[tuple[Device, rv.Box]]:
        """The box of the samples that every rank's program reads."""
        dim, whole = self._dim(tensor), rv.Box.of_shape(self._shape(tensor))
        readers = plan.graph.readers.get(tensor, ())
        reads = (input_sharding(plan, *reader).shards.items() for reader in readers)
        boxes = grouped((device, shard.box) for shards in reads for device, shard in shards)
        if any(tensor in op.inputs for total in plan.graph.totals for op in total.ops):
            boxes |= {device: [tensor.box] for device in plan.devices}
        for device, found in sorted(boxes.items()):
            box = bounding(found)
            lo, hi = (*box.lo[:dim], 0, *box.lo[dim:]), (*box.hi[:dim], self.num, *box.hi[dim:])
            yield device, whole if self._is_whole else rv.Box(lo, hi)

    def _read(
        self,
        tensor: PTensor,
        route: _Route,
        brought: Iterable[tuple[rv.Box, Tensor]],
        device: torch.device,
    ) -> Tensor | OwnSamples:
        """What this rank reads of an input, assembled from what was brought."""
        dtype, dim, found = getattr(torch, tensor.dtype), self._dim(tensor), list(brought)
        box = route.dst or _along(rv.Box.of_shape(self._shape(tensor)), dim + 1, 0, 0)
        if len(found) == 1 and found[0][0] == box:
            value = found[0][1]
        else:
            value = torch.empty(box.shape, dtype=dtype, device=device)
            for part, piece in found:
                value[part.slices_within(box)] = piece
        if self._is_whole and route.dst is not None:
            return value.flatten(dim, dim + 1)
        return OwnSamples(value, box, dim)


def _along(box: rv.Box, dim: int, start: int, stop: int) -> rv.Box:
    """The box with another range of one dim."""
    lo, hi = list(box.lo), list(box.hi)
    lo[dim], hi[dim] = start, stop
    return rv.Box(tuple(lo), tuple(hi))


def whole_of(samples: OwnSamples | Tensor) -> Tensor:
    """An input that a rank has whole, as one tensor."""
    if isinstance(samples, Tensor):
        return samples
    return samples.tensor.flatten(samples.dim, samples.dim + 1)
