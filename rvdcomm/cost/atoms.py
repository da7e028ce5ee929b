"""Atoms: the boxes of which the shards of two layouts consist, and who has and wants each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from rvdcomm.layout import Box, Holdings, Ints, Layout, Mask


@dataclass(frozen=True)
class Atoms:
    """The atoms of two layouts: the largest boxes that no cut point of either layout divides.

    ``sizes`` [atoms] are in elements. ``cuts`` are the cut points of both layouts, by dim.
    """

    sizes: Ints
    cuts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, src: Layout, dst: Layout) -> Atoms:
        cuts = tuple(tuple(sorted({*a, *b})) for a, b in zip(src.cuts, dst.cuts, strict=True))
        sizes = np.ones((), dtype=np.int64)
        for cut in cuts:
            sizes = np.multiply.outer(sizes, np.diff(np.array(cut, dtype=np.int64)))
        return cls(sizes.reshape(-1), cuts)

    def boxes(self) -> Iterator[Box]:
        """The atoms, in the order of ``sizes``."""
        for chosen in product(*map(pairwise, self.cuts)):
            yield Box(tuple(low for low, _ in chosen), tuple(high for _, high in chosen))

    def masks(self, placement: Holdings, homes: dict[int, int], num_homes: int) -> Mask:
        """[num_parts, num_homes, atoms]: whether a home's ranks hold a part of an atom."""
        out = np.zeros((placement.num_parts, num_homes, len(self.sizes)), dtype=np.bool_)
        index = [{bound: i for i, bound in enumerate(cut)} for cut in self.cuts]
        for holding in placement.holdings:
            mask = np.zeros([max(len(cut) - 1, 0) for cut in self.cuts], dtype=np.bool_)
            for box in holding.boxes:
                slices = (
                    slice(ix[low], ix[high])
                    for ix, low, high in zip(index, box.lo, box.hi, strict=True)
                )
                mask[tuple(slices)] = True
            for home in {homes[rank] for rank in holding.ranks}:
                out[holding.part, home] |= mask.reshape(-1)
        return out
