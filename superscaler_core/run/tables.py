"""Tables: what a generated file says about tensors, besides its functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

import rvdcomm as rv

# A program asks for the same few boxes and layouts at every step.
box_of = cache(rv.Box.parse)
layout_of = cache(rv.Layout.parse)


@dataclass(frozen=True)
class Leg:
    """A region of a tensor, moving between two layouts; both are texts of ``rvdcomm.Layout``."""

    box: str
    src: str
    dst: str
    dtype: str

    @cached_property
    def region(self) -> rv.Box:
        """The region."""
        return box_of(self.box)

    @cached_property
    def layouts(self) -> tuple[rv.Layout, rv.Layout]:
        """From which to which."""
        return layout_of(self.src), layout_of(self.dst)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All that take part."""
        return tuple(sorted({*self.layouts[0].ranks, *self.layouts[1].ranks}))

    @property
    def is_idle(self) -> bool:
        """Whether everyone holds what it wants."""
        return self.src == self.dst

    def src_box(self, rank: int) -> rv.Box | None:
        """What a rank brings of the tensor; None if nothing."""
        return _cell(self.layouts[0], self.region, rank)

    def dst_box(self, rank: int) -> rv.Box | None:
        """What a rank takes away; None if nothing."""
        return _cell(self.layouts[1], self.region, rank)


@cache
def _cell(layout: rv.Layout, region: rv.Box, rank: int) -> rv.Box | None:
    """A rank's box of a region, in the tensor that the region is of."""
    if rank not in layout:
        return None
    cell, base = layout.cell(rank).box, region.lo
    return rv.Box(
        tuple(a + b for a, b in zip(cell.lo, base, strict=True)),
        tuple(a + b for a, b in zip(cell.hi, base, strict=True)),
    )


@dataclass(frozen=True)
class RankEdge:
    """An activation that others read: this rank's boxes at both ends (None: it has no end)."""

    src: str | None
    dst: str | None
    dtype: str
    forward: tuple[Leg, ...]
    backward: tuple[Leg, ...] = ()


@dataclass(frozen=True)
class Weight:
    """A copy of a parameter as some ops read it.

    Attributes:
        name: of the parameter.
        box: what this rank reads; None if nothing.
        dtype: in which it is read.
        fetch: from storage to here; empty if it is read where it is stored.
        reduce: its gradient's way to storage.
        windowed: "" or what a window does: "gather" (and reduce), or "reduce" alone.
    """

    name: str
    box: str | None
    dtype: str
    fetch: tuple[Leg, ...]
    reduce: tuple[Leg, ...]
    windowed: str = ""


@dataclass(frozen=True)
class Stored:
    """A parameter: what of it this rank stores (None: nothing), and how all ranks get all of it.

    It may be stored ``on_host``: in the memory beside the device's.
    """

    shape: tuple[int, ...]
    dtype: str
    box: str | None
    is_trained: bool
    whole: tuple[Leg, ...]
    on_host: bool = False

    @property
    def index(self) -> tuple[slice, ...]:
        """Where in the whole parameter lies what this rank stores."""
        assert self.box is not None, "it stores some of it"
        return box_of(self.box).slices_within(rv.Box.of_shape(self.shape))


@dataclass(frozen=True)
class Tables:
    """All that a generated file says, besides its functions.

    Of each of ``buffers``, which have their values among the constants, it says whether others were
    computed of it at the capture.
    """

    rank: int
    num_ranks: int
    num_microbatches: int
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    loss_dtype: str
    loss: tuple[Leg, ...]
    edges: Mapping[str, RankEdge] = field(default_factory=dict)
    weights: Mapping[str, Weight] = field(default_factory=dict)
    parameters: Mapping[str, Stored] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    recomputed: frozenset[str] = frozenset()
    swapped: frozenset[str] = frozenset()
    buffers: Mapping[str, bool] = field(default_factory=dict)
