"""Proof of arrival: whether all results of a call are what was sent, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Unpack

import torch
from torch import Tensor

from rvdcomm.api.arrival_agree import WHAT, agree
from rvdcomm.api.many_request import ManyRequest, name_of
from rvdcomm.api.options import AS_USUAL, CallOptions, OfMany, filled
from rvdcomm.api.tensors import fault_of, resolved
from rvdcomm.api.traced import breaks_graph
from rvdcomm.arrival import (
    Mismatch,
    Tally,
    copies_held,
    differing,
    digest_converted,
    digest_of,
    mismatches,
    parts_owned,
)
from rvdcomm.errors import CommError, LayoutError, ShapeMismatchError
from rvdcomm.layout import Box, Layout
from rvdcomm.run import check_in_group, exchange_posts
from rvdcomm.run.world import World
from rvdcomm.units import bytes_text

MAX_DETAILED = 8
"""Copies of which all tensors are compared one by one, if more differ: each makes a long post."""

MAX_NAMED = 4
"""Differences that an error names."""


@dataclass(frozen=True)
class Difference:
    """A shard whose digest is ``found``, where the ranks that it came from have ``expected``.

    Attributes:
        name: the tensor, by its name in dst; in src if ``is_src``.
        rank: the rank that holds the shard.
        box: the shard's part of the tensor.
        is_src: whether the shard is a replica in src, which differs from its lowest replica.
    """

    name: str
    rank: int
    box: Box
    expected: int
    found: int
    is_src: bool = False

    def __str__(self) -> str:
        noun, other = ("src replica", "first replica") if self.is_src else ("result", "source")
        return (
            f"tensor {self.name!r}: the {noun} of rank {self.rank}, box {self.box}, has digest "
            f"{self.found:#018x}, its {other} {self.expected:#018x}"
        )


@dataclass(frozen=True)
class Arrival:
    """The tensors that arrived, and those of which that is not known.

    Attributes:
        num_tensors: tensors that were compared.
        num_bytes: bytes of their results on all ranks, replicas included.
        unproved: why a tensor was not compared, by its name in dst.
        differences: shards that differ; of at most ``MAX_DETAILED`` ranks.
    """

    num_tensors: int
    num_bytes: int
    unproved: Mapping[str, str]
    differences: tuple[Difference, ...] = ()

    def __add__(self, other: Arrival) -> Arrival:
        """What two calls found, of other tensors each."""
        return Arrival(
            self.num_tensors + other.num_tensors,
            self.num_bytes + other.num_bytes,
            {**self.unproved, **other.unproved},
            self.differences + other.differences,
        )

    def __str__(self) -> str:
        end = f", {len(self.unproved)} not compared" if self.unproved else ""
        found = f"{len(self.differences)} shards differ" if self.differences else "all arrived"
        return f"{self.num_tensors} tensors, {bytes_text(self.num_bytes)}: {found}{end}"


def digest(tensor: Tensor, box: Box | str | None = None) -> int:
    """The digest of a shard that holds ``box`` of a whole tensor, computed where the shard lies.

    Law (tests/arrival/test_digests.py): digests of boxes that tile a tensor add up, modulo 2**64,
    to the digest of the tensor, for all strides, dtypes and devices. docs/many.md defines it.

    Args:
        tensor: the shard, ``[*box.shape]``, maybe strided; any dtype that can be moved.
        box: the part of the whole tensor that the shard holds, or its text; the shard is the whole
            if None.

    Returns:
        A number below 2**64; 0 for an empty box.

    Raises:
        ShapeMismatchError: the shard has not the shape of the box.
        LayoutError: the tensor has no memory that can be read.

    >>> whole = torch.arange(6.0).reshape(2, 3)
    >>> left, right = Box((0, 0), (2, 1)), Box((0, 1), (2, 3))
    >>> parts = digest(whole[:, :1], left) + digest(whole[:, 1:], right)
    >>> parts % 2**64 == digest(whole)
    True
    """
    fault = fault_of(tensor)
    if fault is not None:
        raise LayoutError(f"digest: the tensor {fault}")
    box = Box.of_shape(tensor.shape) if box is None else Box.parse(str(box))
    if tuple(tensor.shape) != box.shape:
        raise ShapeMismatchError(
            f"digest: the tensor is {list(tensor.shape)}, and box {box} is {list(box.shape)}."
        )
    return digest_of(_values(tensor), box)


@breaks_graph
def prove(
    tensors: Mapping[str, Tensor | None],
    src: Mapping[str, Layout | str],
    results: Mapping[str, Tensor | None],
    dst: Mapping[str, Layout | str],
    *,
    check: bool = True,
    options: CallOptions = AS_USUAL,
    **by_name: Unpack[OfMany],
) -> Arrival:
    """Prove that ``results`` are the values of ``tensors``, bit by bit, on all ranks.

    For after ``redistribute_many``, with the same arguments, or after any other way to move a state
    dict. Every rank computes digests of its own shards, and ranks compare sums of them, of a few
    bytes. Replicas in src are compared as well. No tensor is copied; values that were converted are
    converted again, block by block.

    Collective over the ranks of all layouts.

    Args:
        tensors: this rank's shards by the names of ``src``; they must still have their values.
        src, dst: the layouts of every tensor, by the names that it has on either side.
        results: this rank's shards by the names of ``dst``.
        check: raise if something differs; if False, the result says what.
        options: the options of ``redistribute_many`` as one value. Those that say how tensors
            travel (``topology``, ``executor``, ``memory_limit``) only have to be equal on all
            ranks.
        group, names, dtype, dst_dtype, scale: as of ``redistribute_many``. Partial sums and values
            that are scaled to or from float8 are not compared: ``Arrival.unproved``.

    Returns:
        What was compared; equal on all ranks.

    Raises:
        CommError: a shard differs, on every rank, with its tensor, rank, box and digests; or a peer
            failed.
        LayoutError: names do not match, or ranks disagree about the request.
        ShapeMismatchError: some rank's shard is not what its layout gives it.
    """
    asked = filled(WHAT, options, by_name)
    world = World.of(asked.group)
    request = ManyRequest.of(tensors, src, dst, None, asked)
    members = request.ranks(world.size)
    check_in_group(members, world.size, WHAT)
    if world.rank not in members:
        raise LayoutError(f"{WHAT}: rank {world.rank} called it but is in none of the layouts.")
    with world.together(members), torch.no_grad():
        arrival = _arrival(world, members, request, *agree(world, members, request, results))
    if check and arrival.differences:
        raise CommError(_difference_text(arrival.differences))
    return arrival


def _difference_text(differences: Sequence[Difference]) -> str:
    named = "; ".join(map(str, differences[:MAX_NAMED]))
    more = len(differences) - MAX_NAMED
    others = f"; and {more} more shards" if more > 0 else ""
    return f"{WHAT}: not all values arrived: {named}{others}."


def _arrival(
    world: World,
    members: tuple[int, ...],
    request: ManyRequest,
    results: Mapping[str, Tensor],
    dtypes: Mapping[int, str],
) -> Arrival:
    """Compare the digests of all ranks, which agree on the request; collective."""
    shards = _Shards(request, results, dtypes)
    try:
        tally = shards.tally(world.rank)
    except BaseException as error:
        world.fail(error)  # The others wait for the digests of this rank.
        raise
    posts = exchange_posts(world, members, tally.sums(), WHAT)
    found: tuple[Difference, ...] = ()
    if copies := differing(posts.values()):
        posts = exchange_posts(world, members, tally.details(copies[:MAX_DETAILED]), WHAT)
        found = tuple(map(shards.difference, mismatches(posts.values())))
    return Arrival(len(shards.compared), shards.num_bytes, shards.unproved, found)


class _Shards:
    """The shards of this rank on both sides, and what is to be compared of them."""

    def __init__(
        self, request: ManyRequest, results: Mapping[str, Tensor], dtypes: Mapping[int, str]
    ) -> None:
        self._tensors, self._results = request.tensors, results
        self._pairs, (self._src, self._dst) = request.pairs, request.layouts
        reasons = {i: _reason(request, i, dtype) for i, dtype in dtypes.items()}
        self.unproved = {self._pairs[i][1]: why for i, why in reasons.items() if why is not None}
        self.compared = {
            i: getattr(torch, request.becomes(self._pairs[i][1], dtype))
            for i, dtype in dtypes.items()
            if reasons[i] is None
        }
        """The dtype in which a tensor is compared, by its number."""
        self._converted = {i for i, t in self.compared.items() if name_of(t) != dtypes[i]}

    def tally(self, rank: int) -> Tally:
        """The digests of all that this rank owns or holds a copy of."""
        tally = Tally()
        for i, dtype in self.compared.items():
            s, name = self._pairs[i]
            src, dst = self._src[s], self._dst[name]

            def summed(tensor: Tensor, box: Box, i: int = i, dtype: Any = dtype) -> int:
                if i in self._converted:
                    return digest_converted(tensor, box, dtype)
                return digest_of(tensor, box)

            for box, copies in parts_owned(src, dst, rank):
                part = _values(self._tensors[s])[box.slices_within(src.cell(rank).box)]
                tally.own(i, copies, summed(part, box))
            for copy, box in copies_held(src, dst, rank):
                shard = self._tensors[s] if copy.is_src else self._results[name]
                tally.hold(i, copy, summed(_values(shard), box))
        return tally

    @property
    def num_bytes(self) -> int:
        """Bytes of the results that are compared, on all ranks."""
        layouts = {i: self._dst[self._pairs[i][1]] for i in self.compared}
        return sum(
            layouts[i].rvd.r * prod(layouts[i].shape) * dtype.itemsize
            for i, dtype in self.compared.items()
        )

    def difference(self, mismatch: Mismatch) -> Difference:
        """A mismatch with its name and box."""
        copy, i, expected, found = mismatch
        s, name = self._pairs[i]
        layout = self._src[s] if copy.is_src else self._dst[name]
        box = layout.cell(copy.rank).box
        return Difference(s if copy.is_src else name, copy.rank, box, expected, found, copy.is_src)


def _values(tensor: Tensor) -> Tensor:
    return resolved(tensor.detach())


def _reason(request: ManyRequest, number: int, dtype: str) -> str | None:
    """Why digests of a tensor say nothing about its arrival; None if they do."""
    s, name = request.pairs[number]
    if request.layouts[0][s].rvd.v > 1:
        return "its source is partial sums"
    if request.layouts[1][name].rvd.v > 1:
        return "its result is partial sums"
    return "its values are scaled" if request.is_scaled(name, dtype) else None
