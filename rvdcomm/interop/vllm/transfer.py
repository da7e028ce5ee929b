"""Transfer: what trainers hold and what workers need, made into one call of redistribute_many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from typing import Any

import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm import Box, Layout, LayoutError
from rvdcomm.interop.dtensor import union_of
from rvdcomm.interop.vllm.held import Held, clipped, overlaps_of, whole_shape
from rvdcomm.interop.vllm.record import TensorMeta
from rvdcomm.interop.vllm.regions import Region, cropped, regions_of
from rvdcomm.interop.vllm.staging import Staging


@dataclass(frozen=True)
class Offer:
    """A tensor that trainers have: its dtype, and the layouts of its slabs on all ranks."""

    dtype: torch.dtype
    slabs: tuple[Region, ...]

    @property
    def meta(self) -> TensorMeta:
        """Its whole shape and dtype."""
        return TensorMeta(whole_shape(self.slabs), self.dtype)


@dataclass(frozen=True)
class Need:
    """The boxes of a tensor that one worker needs, and the dtype to which it converts them.

    ``dtype`` is None if it uses the values in several ways, and needs those of the checkpoint.
    """

    boxes: tuple[Box, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Piece:
    """A region of a tensor that moves as a tensor of its own; ``box`` is where it lies."""

    name: str
    slab: int
    box: Box
    src: Layout
    dst: Layout


def offers_of(posts: Iterable[Mapping[str, Any]]) -> dict[str, Offer]:
    """What trainers have, from what each of them said with ``said_offers``.

    Raises:
        LayoutError: ranks disagree about a tensor.
    """
    said: dict[str, set[tuple[str, tuple[tuple[str, str], ...]]]] = {}
    for post in posts:
        for name, dtype, index in post["tensors"]:
            slabs = tuple((box, layout) for box, layout in post["layouts"][index])
            said.setdefault(name, set()).add((dtype, slabs))
    return {name: _offer(name, sorted(each)) for name, each in said.items()}


def _offer(name: str, said: Sequence[tuple[str, tuple[tuple[str, str], ...]]]) -> Offer:
    dtypes = {dtype for dtype, _ in said}
    boxes = {tuple(box for box, _ in slabs) for _, slabs in said}
    if len(dtypes) > 1 or len(boxes) > 1:
        raise LayoutError(
            f"tensor {name!r}: trainers disagree: {'; '.join(map(str, said))}. Give equal dtypes, "
            "and placements that cut alike."
        )
    slabs = [
        (Box.parse(box), union_of(name, [Layout.parse(each[1][i][1]) for each in said]))
        for i, box in enumerate(boxes.pop())
    ]
    return Offer(getattr(torch, dtypes.pop()), tuple(slabs))


def said_offers(held: Mapping[str, Held]) -> dict[str, Any]:
    """What a trainer says of its tensors, as JSON; equal layouts are said once."""
    layouts: dict[tuple[tuple[str, str], ...], int] = {}
    tensors = []
    for name, each in held.items():
        slabs = tuple((str(box), str(layout)) for box, layout in each.slabs)
        index = layouts.setdefault(slabs, len(layouts))
        tensors.append([name, str(each.dtype).removeprefix("torch."), index])
    return {"tensors": tensors, "layouts": [list(map(list, slabs)) for slabs in layouts]}


def said_needs(needs: Mapping[str, Need]) -> dict[str, Any]:
    """What a worker says of its needs, as JSON."""
    return {
        name: [
            list(map(str, need.boxes)),
            None if need.dtype is None else str(need.dtype).removeprefix("torch."),
        ]
        for name, need in needs.items()
    }


def needs_of(said: Mapping[str, Any]) -> dict[str, Need]:
    """The needs that a worker said with ``said_needs``."""
    return {
        name: Need(
            tuple(map(Box.parse, boxes)), None if dtype is None else getattr(torch, str(dtype))
        )
        for name, (boxes, dtype) in said.items()
    }


@dataclass(frozen=True)
class Transfer:
    """All that moves in an update, the same on every rank.

    ``needs`` are those of each worker, by its rank in the joint group, where trainers are first.
    """

    offers: Mapping[str, Offer]
    needs: Mapping[int, Mapping[str, Need]]

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        """The pieces by a name of their own: that of the tensor, and its box if there are more."""
        found: dict[str, Piece] = {}
        for name, offer in self.offers.items():
            boxes = {rank: of[name].boxes for rank, of in self.needs.items() if name in of}
            of_tensor = [
                Piece(
                    name, i, box, _cropped(layout, box, slab), _cropped(region_layout, box, region)
                )
                for (i, (slab, layout)), (region, region_layout) in product(
                    enumerate(offer.slabs), regions_of(boxes)
                )
                for box in overlaps_of(slab, region)
            ]
            is_alone = len(of_tensor) == 1
            found |= {name if is_alone else f"{name}{piece.box}": piece for piece in of_tensor}
        return found

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor travels and is staged: that of all workers if narrower."""
        own = self.offers[name].dtype
        wanted = {of[name].dtype for of in self.needs.values() if name in of}
        (only,) = wanted if len(wanted) == 1 else (None,)
        is_narrower = (
            only is not None
            and only.is_floating_point
            and own.is_floating_point
            and only.itemsize < own.itemsize
        )
        return only if is_narrower and only is not None else own

    @cached_property
    def layers(self) -> tuple[Transfer, ...]:
        """What moves of each layer, in the order of the trainers' tensors."""
        found = []
        for _, group in groupby(self.offers, _layer):
            names = list(group)
            needs = {
                rank: {name: of[name] for name in names if name in of}
                for rank, of in self.needs.items()
            }
            found.append(Transfer({name: self.offers[name] for name in names}, needs))
        return tuple(found)

    def staging(self, rank: int, device: torch.device) -> Staging:
        """The memory of a worker."""
        needs = self.needs[rank]
        return Staging(
            {name: offer.meta for name, offer in self.offers.items()},
            {name: need.boxes for name, need in needs.items()},
            {name: self.dtype(name) for name in needs},
            device,
        )

    def share_bytes(self, rank: int) -> int:
        """Bytes that a worker needs, as they travel."""
        return sum(
            box.num_elements * self.dtype(name).itemsize
            for name, need in self.needs[rank].items()
            for box in need.boxes
        )

    def sources(self, held: Mapping[str, Held], rank: int) -> dict[str, Tensor]:
        """The shards that a trainer passes for each piece; views of what it holds."""
        found = {}
        for key, piece in self.pieces.items():
            if rank in piece.src:
                of = held[piece.name]
                slab, layout = self.offers[piece.name].slabs[piece.slab]
                box = _moved(piece.box, slab)
                found[key] = clipped(of.parts[piece.slab], layout.cell(rank).box, box)
        return found

    def results(self, staging: Staging, rank: int) -> dict[str, Tensor]:
        """The memory that a worker gives for each piece."""
        found = {}
        for key, piece in self.pieces.items():
            if rank in piece.dst:
                cell = piece.dst.cell(rank).box
                found[key] = (
                    torch.empty(cell.shape, dtype=self.dtype(piece.name), device=staging.device)
                    if cell.is_empty
                    else staging.view(piece.name, _shifted(cell, piece.box.lo))
                )
        return found

    def move(
        self,
        rank: int,
        tensors: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
        options: rv.CallOptions,
        *,
        proof: bool,
    ) -> rv.Arrival | None:
        """Move all pieces; collective over trainers and workers.

        Returns:
            What was compared if ``proof``, with the errors of ``rvdcomm.prove``; None on ranks that
            have no part in it.
        """
        if not any(rank in piece.src or rank in piece.dst for piece in self.pieces.values()):
            return None
        options = self._with_dtypes(options)
        rv.redistribute_many(tensors, self.src, self.dst, out=out, options=options)
        return rv.prove(tensors, self.src, out, self.dst, options=options) if proof else None

    def _with_dtypes(self, options: rv.CallOptions) -> rv.CallOptions:
        pieces = self.pieces.items()
        return options._replace(
            dtype={key: self.offers[piece.name].dtype for key, piece in pieces},
            dst_dtype={key: self.dtype(piece.name) for key, piece in pieces},
        )

    @cached_property
    def src(self) -> dict[str, Layout]:
        """Layouts of the pieces at the trainers."""
        return {key: piece.src for key, piece in self.pieces.items()}

    @cached_property
    def dst(self) -> dict[str, Layout]:
        """Layouts of the pieces at the workers."""
        return {key: piece.dst for key, piece in self.pieces.items()}


def _layer(name: str) -> str:
    """What tensors of one layer have in common: the name up to its first number."""
    found = re.match(r"(.*?\.)?\d+\.", name)
    return found.group() if found else name


def _cropped(layout: Layout, box: Box, outer: Box) -> Layout:
    inner = _moved(box, outer)
    return layout if inner == Box.of_shape(layout.shape) else cropped(layout, inner)


def _moved(box: Box, outer: Box) -> Box:
    """A box in coordinates that begin where ``outer`` does."""
    return _shifted(box, tuple(-low for low in outer.lo))


def _shifted(box: Box, by: Sequence[int]) -> Box:
    return Box(
        tuple(low + x for low, x in zip(box.lo, by, strict=True)),
        tuple(high + x for high, x in zip(box.hi, by, strict=True)),
    )
