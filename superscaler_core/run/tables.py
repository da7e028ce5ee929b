"""Tables: the data of a generated file, besides its functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from torch import Tensor

import rvdcomm as rv
from superscaler_core.graph.packing import Packing

# A program asks for the same few boxes and layouts in every step.
box_of = cache(rv.Box.parse)
layout_of = cache(rv.Layout.parse)


@dataclass(frozen=True)
class SubTransfer:
    """A region of a tensor that moves between two layouts, given as ``rvdcomm.Layout`` texts."""

    box: str
    src: str
    dst: str
    dtype: str

    @cached_property
    def region(self) -> rv.Box:
        """The box of the region."""
        return box_of(self.box)

    @cached_property
    def layouts(self) -> tuple[rv.Layout, rv.Layout]:
        """The src and dst layouts."""
        return layout_of(self.src), layout_of(self.dst)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part."""
        return tuple(sorted({*self.layouts[0].ranks, *self.layouts[1].ranks}))

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves, because every rank already holds what it wants."""
        return self.src == self.dst

    def src_box(self, rank: int) -> rv.Box | None:
        """The box of the tensor that a rank contributes; None if none."""
        return _cell(self.layouts[0], self.region, rank)

    def dst_box(self, rank: int) -> rv.Box | None:
        """The box of the tensor that a rank receives; None if none."""
        return _cell(self.layouts[1], self.region, rank)


@cache
def _cell(layout: rv.Layout, region: rv.Box, rank: int) -> rv.Box | None:
    """A rank's box of a region, in coordinates of the whole tensor."""
    if rank not in layout:
        return None
    cell, base = layout.cell(rank).box, region.lo
    return rv.Box(
        tuple(a + b for a, b in zip(cell.lo, base, strict=True)),
        tuple(a + b for a, b in zip(cell.hi, base, strict=True)),
    )


@dataclass(frozen=True)
class RankEdge:
    """An edge of an activation: this rank's boxes at both ends (None: the rank is not there)."""

    src: str | None
    dst: str | None
    dtype: str
    forward: tuple[SubTransfer, ...]
    backward: tuple[SubTransfer, ...] = ()

    def named(self, *names: str) -> dict[str, RankEdge]:
        """This entry for several edges."""
        return dict.fromkeys(names, self)


@dataclass(frozen=True)
class Weight:
    """A copy of a parameter as some ops read it.

    Attributes:
        name: name of the parameter.
        box: the box that this rank reads; None if it reads none.
        dtype: dtype in which it is read.
        fetch: sub-transfers from storage to the readers; empty if every reader stores the
            parameter.
        reduce: sub-transfers of the gradient to storage.
        unit: "" outside FSDP units; "unshard" if an FSDP unit gathers the weight and reduces its
            gradient, "reduce" if it only reduces the gradient.
        is_borrowed: whether another stage than that of the readers updates the parameter.
    """

    name: str
    box: str | None
    dtype: str
    fetch: tuple[SubTransfer, ...]
    reduce: tuple[SubTransfer, ...]
    unit: str = ""
    is_borrowed: bool = False

    def named(self, *names: str) -> dict[str, Weight]:
        """This entry for several parameters."""
        return {name: replace(self, name=name) for name in names}


@dataclass(frozen=True)
class Stored:
    """A parameter: the box that this rank stores (None: nothing), and sub-transfers that gather it
    whole.

    ``on_host`` tells whether it is stored in host memory. ``packing`` tells how the program reads
    a parameter whose features are several pieces: ``shape`` and all boxes are in these dims, while
    optimizers, checkpoints and callers see the dims of the model.
    """

    shape: tuple[int, ...]
    dtype: str
    box: str | None
    is_trained: bool
    whole: tuple[SubTransfer, ...]
    on_host: bool = False
    packing: Packing | None = None

    def named(self, *names: str) -> dict[str, Stored]:
        """This entry for several parameters."""
        return dict.fromkeys(names, self)

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter in the model."""
        return self.packing.merged(self.shape) if self.packing else self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what this rank stores, with the dims of the model."""
        assert self.box is not None, "it stores some of it"
        shape = box_of(self.box).shape
        return self.packing.merged(shape) if self.packing else shape

    def packed(self, whole: Tensor) -> Tensor:
        """The whole parameter in the dims of the program; a view."""
        return self.packing.packed(whole) if self.packing else whole

    def unpacked(self, tensor: Tensor) -> Tensor:
        """The whole parameter, or a box of it, in the dims of the model."""
        return self.packing.unpacked(tensor) if self.packing else tensor

    def boxed(self, stored: Tensor) -> Tensor:
        """A tensor of ``stored_shape`` in the dims of the program; a view."""
        if self.packing is None or self.box is None:
            return stored
        return stored.view(box_of(self.box).shape)

    def taken(self, whole: Tensor) -> Tensor:
        """What this rank stores of the whole parameter in the dims of the model."""
        return self.unpacked(self.packed(whole)[self.index])

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of this rank's box in the whole parameter."""
        assert self.box is not None, "it stores some of it"
        return box_of(self.box).slices_within(rv.Box.of_shape(self.shape))


@dataclass(frozen=True)
class Tables:
    """The data of a generated file, besides its functions.

    The values of ``buffers`` are among the constants. Each entry tells whether the capture computed
    other constants from the buffer. Those in ``states`` change in a step, and have sub-transfers
    that bring them to all ranks. ``results`` has the edges that bring results out of the program,
    each with the name of its result and the dim that has the samples. ``samples`` has the dim of
    each input that has the samples, if it is not dim 0. ``microbatches_per_update`` is None if
    weights are updated after a step; otherwise ``delays`` has the delay of the gradients of every
    trained parameter on this rank (``Schedule.delays``), and ``one_version`` tells whether
    backwards read the newest weights. ``extra`` has what modules add to a state dict, as texts of
    plain values. ``boxes`` has the boxes of inputs that segments read, each with the input's name.
    ``carried`` has the results of which this rank keeps a box, each with the name of the input that
    it is in the next step, or "".
    ``order`` has the names of the parameters in the order of the model. ``arguments`` has the
    arguments of the model whose input has another name, because a weight has theirs.
    """

    rank: int
    num_ranks: int
    num_microbatches: int
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    loss_dtype: str
    loss: tuple[SubTransfer, ...]
    edges: Mapping[str, RankEdge] = field(default_factory=dict)
    weights: Mapping[str, Weight] = field(default_factory=dict)
    parameters: Mapping[str, Stored] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    buffers: Mapping[str, bool] = field(default_factory=dict)
    results: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    states: Mapping[str, tuple[SubTransfer, ...]] = field(default_factory=dict)
    microbatches_per_update: int | None = None
    delays: Mapping[str, float] = field(default_factory=dict)
    one_version: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, int | None] = field(default_factory=dict)
    boxes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    carried: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # All ranks prepare edges in one order, and optimizers have the parameters in the model's.
        place = {name: number for number, name in enumerate(self.order)}
        edges = sorted(self.edges.items(), key=lambda pair: place_of_edge(pair[0]))
        weights = sorted(self.weights.items(), key=lambda pair: place.get(pair[1].name, 0))
        parameters = sorted(self.parameters.items(), key=lambda pair: place.get(pair[0], 0))
        for name, entries in (("edges", edges), ("weights", weights), ("parameters", parameters)):
            object.__setattr__(self, name, dict(entries))

    def samples_dim(self, name: str) -> int | None:
        """The dim of an input that has the samples; None if it belongs to all microbatches."""
        shape, _ = self.inputs[name]
        return self.samples.get(name, 0 if shape else None)


def place_of_edge(name: str) -> tuple[int, ...]:
    """The place of an edge in the order of edges, by its name.

    >>> place_of_edge("e12.1") > place_of_edge("e12") > place_of_edge("e3")
    True
    """
    return tuple(map(int, name.removeprefix("e").split(".")))
