"""Sharding: a tensor on a mesh whose dims replicate, hold summands or cut; DTensor without torch.

A layout is one grid of boxes. So is a sharding, unless strided cuts leave a rank with gaps; every
*slab* of the tensor is then a grid of boxes (slabs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from rvdcomm import LayoutError
from rvdcomm.interop.dtensor.runs import Runs, nested_runs, within
from rvdcomm.layout import RVD, Box, Layout, ranges_text

Cutters = tuple[tuple[int, int], ...]
"""Mesh dims that cut a tensor dim, in turn, each with its split factor (1 for ``Shard``)."""


@dataclass(frozen=True)
class DTensorSharding:
    """A tensor of ``shape`` on a mesh: ``mesh`` has the sizes of its dims, ``ranks`` is row-major.

    Along the mesh dims ``parts``, ranks hold value parts (partial sums). Along the mesh dims in
    ``cutters[d]``, they hold pieces of dim d. Along all other mesh dims they hold replicas.

    Law (tests/interop/test_dtensor_layouts.py): ``layout().cell(rank).box`` is what DTensor's
    ``compute_local_shape_and_global_offset`` says.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: tuple[int, ...]
    cutters: tuple[Cutters, ...]

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Mesh dims along which ranks hold replicas."""
        used = {*self.parts, *(m for cutters in self.cutters for m, _ in cutters)}
        return tuple(m for m in range(len(self.mesh)) if m not in used)

    @cached_property
    def runs(self) -> tuple[list[Runs], ...]:
        """By tensor dim: the runs that each coordinate of its cutters holds, row-major."""
        return tuple(
            nested_runs(size, [(self.mesh[m], factor) for m, factor in cutters])
            for size, cutters in zip(self.shape, self.cutters, strict=True)
        )

    def held(self, rank: int) -> tuple[Runs, ...]:
        """The runs that ``rank`` holds of every tensor dim."""
        coordinate = np.unravel_index(self.ranks.index(rank), self.mesh)
        found = []
        for runs, cutters in zip(self.runs, self.cutters, strict=True):
            index = 0
            for m, _ in cutters:
                index = index * self.mesh[m] + int(coordinate[m])
            found.append(runs[index])
        return tuple(found)

    def renumbered(self, numbering: Mapping[int, int] | None) -> DTensorSharding:
        """The same sharding, with ranks as another group numbers them.

        Raises:
            LayoutError: the group lacks a rank of the mesh.
        """
        if numbering is None:
            return self
        outside = [rank for rank in self.ranks if rank not in numbering]
        if outside:
            raise LayoutError(
                f"{self}: the group that was given has no ranks {outside} of the mesh; give a "
                "group that holds all ranks of the meshes."
            )
        return replace(self, ranks=tuple(numbering[rank] for rank in self.ranks))

    def layout(self, slab: Box | None = None) -> Layout:
        """The layout of the tensor, or of a slab as a tensor of its own.

        Raises:
            LayoutError: the shard of some rank has gaps, within the slab if one is given.
        """
        slab = slab or Box.of_shape(self.shape)
        cut_dims = [m for cutters in self.cutters for m, _ in cutters]
        r, v = (prod(self.mesh[m] for m in dims) for dims in (self.replicas, self.parts))
        counts = tuple(len(runs) for runs in self.runs)
        array = np.array(self.ranks).reshape(self.mesh)
        array = array.transpose(*self.replicas, *self.parts, *cut_dims).reshape(r, v, *counts)
        cuts = []
        for d, runs in enumerate(self.runs):
            order, points = self._grid(d, runs, slab.lo[d], slab.hi[d])
            array = array.take(order, axis=2 + d)
            cuts.append(points)
        return Layout(slab.shape, RVD(r, v, counts), array.reshape(-1).tolist(), cuts)

    def _grid(self, d: int, runs: list[Runs], lo: int, hi: int) -> tuple[list[int], list[int]]:
        """Coordinates in the order of their ranges in ``[lo, hi)``, and the cut points from lo."""
        clipped = [within(held, lo, hi) for held in runs]
        gaps = [held for held in clipped if len(held) > 1]
        if gaps:
            raise LayoutError(
                f"{self}: strided shards leave gaps in dim {d}, where a rank holds "
                f"{', '.join(f'{a}:{b}' for a, b in gaps[0])}; a layout holds one range a rank. "
                "rvdcomm.interop.dtensor.redistribute moves it in slabs."
            )
        # DTensor puts empty ranges at the end of the dim, wherever their neighbours are.
        ranges = [
            (held[0][0] - lo, held[0][1] - lo) if held else (hi - lo,) * 2 for held in clipped
        ]
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        return order, [*(ranges[i][0] for i in order), hi - lo]

    def __str__(self) -> str:
        placed = ["R"] * len(self.mesh)
        for m in self.parts:
            placed[m] = "P"
        for d, cutters in enumerate(self.cutters):
            for turn, (m, factor) in enumerate(cutters):
                strided = "" if factor == 1 else f",{factor}"
                placed[m] = f"S({d}{strided})" + (f"[{turn}]" if len(cutters) > 1 else "")
        return (
            f"[{' '.join(placed)}] of shape {self.shape} on mesh {self.mesh} of ranks "
            f"({ranges_text(self.ranks)})"
        )
