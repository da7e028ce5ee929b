"""Shapes: lines, meshes and tori of ranks that are wired to their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, product
from math import prod

from rvdcomm.errors import LayoutError
from rvdcomm.network.link import Link
from rvdcomm.network.network import Network, Wire, both_ways


def line(links: Iterable[Link]) -> Network:
    """Ranks in a line; ``links[i]`` joins ranks ``i`` and ``i + 1`` in both directions."""
    return Network(
        tuple(chain.from_iterable(both_ways([i], i + 1, link) for i, link in enumerate(links)))
    )


def mesh(sides: Sequence[int], link: Link) -> Network:
    """A grid of any number of dims, each rank wired to its neighbours; the last dim innermost.

    >>> print(mesh((2, 2), Link(1e-6, 1e9)))
    0 <-> 1  1 us  1 GB/s
    0 <-> 2  1 us  1 GB/s
    1,2 <-> 3  1 us  1 GB/s
    """
    return _grid(sides, link, is_ring=False)


def torus(sides: Sequence[int], link: Link) -> Network:
    """A mesh whose dims of more than 2 ranks are closed to rings; of one dim, a ring."""
    return _grid(sides, link, is_ring=True)


def _grid(sides: Sequence[int], link: Link, is_ring: bool) -> Network:
    if not sides or min(sides) < 1 or prod(sides) < 2:
        raise LayoutError(
            f"a grid of {'x'.join(map(str, sides)) or 'no'} ranks: expected sides of at least 1, "
            "and 2 ranks or more."
        )
    strides = [prod(sides[dim + 1 :]) for dim in range(len(sides))]
    wires: list[Wire] = []
    for at in product(*map(range, sides)):
        rank = sum(i * stride for i, stride in zip(at, strides, strict=True))
        for i, side, stride in zip(at, sides, strides, strict=True):
            if i + 1 < side:
                wires += both_ways([rank], rank + stride, link)
            elif is_ring and side > 2:
                wires += both_ways([rank], rank - i * stride, link)
    return Network(tuple(wires))
