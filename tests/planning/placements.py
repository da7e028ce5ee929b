"""Oracle: computes the placement of a binding piece by piece, from the definition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

from rvdcomm.layout import Box, Holding, Holdings, Layout, balanced_cuts, merged
from rvdcomm.planning.binding import Binding, Source, V


def placement_of(source: Source) -> Holdings:
    """The placement of a layout or binding; parts are numbered by the coordinates of the V axes."""
    if isinstance(source, Layout):
        return source.placement
    grid, targets = source.grid, source.targets
    members: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for position, rank in enumerate(grid.ranks):
        coords = [position // axis.stride % axis.size for axis in grid.axes]
        part = tuple(c for c, t in zip(coords, targets, strict=True) if t == V)
        cell = tuple(c if t >= 0 else -1 for c, t in zip(coords, targets, strict=True))
        members.setdefault((part, cell), []).append(rank)
    part_sizes = [axis.size for axis, t in zip(grid.axes, targets, strict=True) if t == V]
    holdings = tuple(
        Holding(
            mixed_radix(part, part_sizes),
            boxes(source, {t: c for t, c in zip(targets, cell, strict=True) if t >= 0}),
            tuple(sorted(ranks)),
        )
        for (part, cell), ranks in members.items()
    )
    return Holdings(grid.shape, prod(part_sizes), holdings)


def boxes(binding: Binding, value: Mapping[int, int]) -> tuple[Box, ...]:
    """The boxes whose bound digits have the given values, merged and without empty boxes."""
    cuts = binding.grid.cuts
    indices = product(*(pieces(binding, d, value) for d in range(len(cuts))))
    atoms = (
        Box(
            tuple(cut[p] for cut, p in zip(cuts, index, strict=True)),
            tuple(cut[p + 1] for cut, p in zip(cuts, index, strict=True)),
        )
        for index in indices
    )
    return merged(box for atom in atoms for box in scratch_boxes(binding, atom, value))


def pieces(binding: Binding, d: int, value: Mapping[int, int]) -> list[int]:
    """The finest pieces of dim ``d`` whose bound digits have the given values, ascending."""
    found = [0]
    for i in binding.grid.digit_values(d):
        size = binding.grid.digits[i].size
        values: Iterable[int] = [value[i]] if i in value else range(size)
        found = [piece * size + v for piece in found for v in values]
    return found


def scratch_boxes(binding: Binding, atom: Box, value: Mapping[int, int]) -> list[Box]:
    """The boxes of ``atom`` whose bound scratch digits have the given values."""
    grid = binding.grid
    sizes = [grid.axes[a].size for a in binding.scratch_order]
    cuts = balanced_cuts(atom.num_elements, prod(sizes))
    choices = [
        [value[grid.scratch(a)]] if grid.scratch(a) in value else range(size)
        for a, size in zip(binding.scratch_order, sizes, strict=True)
    ]
    indices = (mixed_radix(index, sizes) for index in product(*choices))
    return [box for i in indices for box in atom.flat_range(cuts[i], cuts[i + 1])]


def mixed_radix(digits: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for digit, size in zip(digits, sizes, strict=True):
        number = number * size + digit
    return number
