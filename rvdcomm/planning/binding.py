"""Bindings: rank axes bound to R, to V or to digits of the tensor's index (docs/primitives.md).

A rank's position is a mixed-radix number over *axes*. The index of a piece of a dim is a
mixed-radix number over *digits*. ``refine`` finds the coarsest axes and digits that can express
both layouts and the groups of the topology. A binding then says what each axis counts: replicas
(R), value parts (V, the partial sums), or the values of one digit of equal size. A digit without an
axis is local: each rank holds all its values.

Every axis also has a *scratch* digit. It cuts each atom (a box with all digits fixed) *flat*: into
runs of the row-major order. This makes a reduce-scatter possible for any shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from rvdcomm.layout import Cuts, Layout, widest_pieces
from rvdcomm.network import Topology
from rvdcomm.planning.factors import (
    Factor,
    Numbering,
    R,
    V,
    factors_of,
    is_chain,
    level_blocks,
    numberings,
)

__all__ = ["Binding", "BoundAxis", "Digit", "Grid", "R", "Source", "V", "refine"]


@dataclass(frozen=True, slots=True)
class BoundAxis:
    """A factor of the rank numbering; a rank's coordinate is ``position // stride % size``."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Digit:
    """A factor of a dim's index: it cuts each of ``place`` coarser pieces into ``size`` pieces."""

    dim: int
    place: int
    size: int


@dataclass(frozen=True)
class Grid:
    """The common part of the bindings of one group: numbering, axes (outermost first) and digits.

    ``cuts`` are the cut points of the finest pieces of every dim; they need not be even.
    ``blocks[level]`` is the number of ranks in a group of that topology level. ``is_even`` says
    that the finest pieces of every dim are equally large. ``span`` is ``ranks`` as a range, or None
    if they are not known to be consecutive.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    axes: tuple[BoundAxis, ...]
    digits: tuple[Digit, ...]
    cuts: Cuts
    blocks: tuple[int, ...]
    is_even: bool
    span: range | None

    def scratch(self, axis: int) -> int:
        """The target that stands for the scratch digit of ``axis``."""
        return len(self.digits) + axis

    def position(self, rank: int) -> int:
        """The position of ``rank`` in the numbering: its index in ``ranks``."""
        return self.positions[rank] if self.span is None else rank - self.span.start

    def group(self, rank: int, free: Iterable[int]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` in the ``free`` axes alone, ascending."""
        position = self.position(rank)
        positions = [position]
        for axis in (self.axes[a] for a in free):
            own = position // axis.stride % axis.size
            steps = [(c - own) * axis.stride for c in range(axis.size)]
            positions = [p + step for p in positions for step in steps]
        return tuple(sorted([self.ranks[p] for p in positions]))

    def groups(self, free: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ in the ``free`` axes alone, each ascending, sorted."""
        order = sorted(range(len(self.axes)), key=lambda a: (a in free, a))
        ranks = np.array(self.ranks).reshape([axis.size for axis in self.axes]).transpose(order)
        groups = np.sort(ranks.reshape(-1, prod(self.axes[a].size for a in free)), axis=1)
        return tuple(sorted(map(tuple, groups.tolist())))

    @cached_property
    def outer_axes(self) -> tuple[tuple[int, ...], ...]:
        """For every level of the topology, the axes whose coordinates identify a group."""
        axes = list(enumerate(self.axes))
        return tuple(tuple(a for a, axis in axes if axis.stride >= block) for block in self.blocks)

    @cached_property
    def positions(self) -> dict[int, int]:
        """The position of every rank in the numbering."""
        return {rank: i for i, rank in enumerate(self.ranks)}

    def digit_values(self, dim: int) -> list[int]:
        """The digits of ``dim`` as targets, most significant first."""
        found = [i for i, digit in enumerate(self.digits) if digit.dim == dim]
        return sorted(found, key=lambda i: self.digits[i].place)


@dataclass(frozen=True)
class Binding:
    """The targets of all axes of ``grid``: each ``R``, ``V``, a digit or the axis's scratch digit.

    Digit i of the grid is target i; ``R`` and ``V`` are negative.

    ``scratch_order`` lists the axes whose scratch digits are used anywhere in the path; the first
    one cuts outermost.

    Laws (tests/planning/test_binding.py): ``refine(src, dst)`` gives bindings with the placements
    of ``src`` and ``dst``; every part's boxes tile the tensor.
    """

    grid: Grid
    targets: tuple[int, ...]
    scratch_order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the tensor."""
        return self.grid.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group, in the order of their positions."""
        return self.grid.ranks

    @property
    def cuts(self) -> Cuts:
        """Cut points of the finest pieces of every dim."""
        return self.grid.cuts

    @property
    def span(self) -> range | None:
        """The ranks as a range, or None if they are not known to be consecutive."""
        return self.grid.span

    def __contains__(self, rank: int) -> bool:
        return rank in (self.grid.positions if self.grid.span is None else self.grid.span)

    def position(self, rank: int) -> int:
        """The index of ``rank`` in ``ranks``."""
        return self.grid.position(rank)

    @property
    def is_even(self) -> bool:
        """Whether all shards are known to be equally large, so that closed-form costs are exact."""
        grid = self.grid
        cuts = zip(grid.shape, grid.cuts, strict=True)
        atom = prod(size // (len(cut) - 1) for size, cut in cuts)
        return grid.is_even and atom % prod(grid.axes[a].size for a in self.scratch_order) == 0

    @property
    def padded_elements(self) -> int:
        """Elements of the tensor if all (scratch) pieces were as large as the largest one.

        If a rank holds several pieces, each of them is cut by the same scratch digits.
        """
        num_scratch = prod(self.grid.axes[a].size for a in self.scratch_order)
        largest = -(-prod(widest_pieces(self.grid.cuts)) // num_scratch) * num_scratch
        return largest * prod(len(cut) - 1 for cut in self.grid.cuts)

    @property
    def largest_shard(self) -> int:
        """An upper bound on the elements of the largest shard; exact if the binding ``is_even``."""
        axes = zip(self.grid.axes, self.targets, strict=True)
        return self.padded_elements // prod(axis.size for axis, target in axes if target >= 0)

    def __str__(self) -> str:
        """Counts as in RVD; ``*n`` is a strided cut, ``F(n)`` a flat cut of every box."""
        sizes = [axis.size for axis in self.grid.axes]
        counts = {
            target: prod(s for s, t in zip(sizes, self.targets, strict=True) if t == target)
            for target in (R, V)
        }
        bound = set(self.targets)
        dims = []
        for d in range(len(self.grid.shape)):
            is_strided, count = False, 1
            outer_is_local = False
            for i in self.grid.digit_values(d):
                if i in bound:
                    count *= self.grid.digits[i].size
                    is_strided |= outer_is_local
                else:
                    outer_is_local = True
            dims.append(f"*{count}" if is_strided else str(count))
        flat = prod(s for a, s in enumerate(sizes) if self.targets[a] == self.grid.scratch(a))
        text = f"R({counts[R]})V({counts[V]})D({','.join(dims)})"
        return f"{text}F({flat})" if flat > 1 else text


Source = Layout | Binding
"""What a state is computed from; both types have shape, ranks, cuts, positions, largest shard."""


# --- refinement ---------------------------------------------------------------------------------


def refine(src: Layout, dst: Layout, topology: Topology) -> tuple[Binding, Binding] | None:
    """Two layouts of one rank set as bindings of one grid; None if the pair is *irregular*.

    A pair is irregular if the map from cells to ranks of one layout does not factor, or if the cut
    points do not nest (2*3 against 3*2, or most ragged pairs).
    """
    for numbering in numberings(src, dst, topology):
        found = _refine_numbered(src, dst, numbering, topology)
        if found is not None:
            return found
    return None


def _refine_numbered(
    src: Layout, dst: Layout, numbering: Numbering, topology: Topology
) -> tuple[Binding, Binding] | None:
    blocks = level_blocks(numbering, topology)
    cuts = _finest_cuts(src, dst)
    first, second = factors_of(src, numbering), factors_of(dst, numbering)
    if blocks is None or cuts is None or first is None or second is None:
        return None
    common = _common_factors(src, dst, [*first, *second], blocks)
    if common is None:
        return None
    strides, places = common
    axes = tuple(
        BoundAxis(outer // inner, inner) for inner, outer in reversed([*pairwise(strides)])
    )
    digits = tuple(
        Digit(d, place, finer // place)
        for d, bounds in enumerate(places)
        for place, finer in pairwise(bounds)
    )
    grid = Grid(
        src.shape,
        numbering.ranks,
        axes,
        digits,
        cuts,
        blocks,
        is_even=src.is_even and dst.is_even,
        span=numbering.span,
    )
    index = {(digit.dim, digit.place): i for i, digit in enumerate(digits)}
    return (
        Binding(grid, tuple(_target(axis, first, index) for axis in axes)),
        Binding(grid, tuple(_target(axis, second, index) for axis in axes)),
    )


def _common_factors(
    src: Layout, dst: Layout, links: list[Factor], blocks: tuple[int, ...]
) -> tuple[list[int], list[list[int]]] | None:
    """Strides of axes, and places of every dim's digits, that can express both layouts.

    Splitting an axis splits its digit, and splitting a digit splits its axis. This is repeated
    until no new stride or place appears. None if the strides or places do not nest.
    """
    strides = {1, len(src.ranks), *blocks}
    strides.update(bound for link in links for bound in (link.lo, link.hi))
    places: list[set[int]] = [{1, s, t} for s, t in zip(src.rvd.d, dst.rvd.d, strict=True)]
    changed = True
    while changed:
        if not is_chain(strides) or not all(map(is_chain, places)):
            return None
        changed = False
        for link in (link for link in links if link.mode >= 0):
            top = link.place * link.hi
            own_strides = [x for x in strides if link.lo <= x <= link.hi]
            own_places = [p for p in places[link.mode] if link.place <= p <= top // link.lo]
            if any(top % x for x in own_strides) or any(top % p for p in own_places):
                return None
            num_known = len(strides) + len(places[link.mode])
            places[link.mode].update(top // x for x in own_strides)
            strides.update(top // p for p in own_places)
            changed |= len(strides) + len(places[link.mode]) > num_known
    return sorted(strides), [sorted(bounds) for bounds in places]


def _target(axis: BoundAxis, factors: list[Factor], index: dict[tuple[int, int], int]) -> int:
    factor = next(f for f in factors if f.lo <= axis.stride < f.hi)
    if factor.mode < 0:
        return factor.mode
    place = factor.place * factor.hi // (axis.stride * axis.size)
    return index[factor.mode, place]


def _finest_cuts(src: Layout, dst: Layout) -> Cuts | None:
    """The finer side's cuts of every dim; None unless every n-th point is the coarser side's."""
    finest = []
    for a, b in zip(src.cuts, dst.cuts, strict=True):
        coarse, fine = sorted((a, b), key=len)
        if fine[:: (len(fine) - 1) // (len(coarse) - 1)] != coarse:
            return None
        finest.append(fine)
    return tuple(finest)
