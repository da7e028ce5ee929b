"""Adjoint: the layouts of gradients, and the transition that takes them back (docs/gradients.md).

A loss reads the shards of ``dst``, so every rank of ``dst`` gets the gradient of its own shard. How
these gradients combine to the gradient of the tensor determines their layout:

- Replicas that are read by different parts of a loss have gradients that *add up* to the gradient
  of the tensor. Value parts are read only as a sum, so their gradients are *equal*. So R and V are
  exchanged: this is the ``dual`` layout. The transition between the duals is then the exact
  adjoint of the forward transition: ``sum <g, T x> == sum <T* g, x>`` over all ranks, for all
  shards ``x`` that are legal in ``src`` and all gradients ``g`` that a loss can have
  (tests/plans/test_adjoint.py).
- Replicas that all compute the same loss have equal gradients, each of them the gradient of the
  tensor. Every holder of a box then holds a copy: this is the ``copies`` layout. DTensor uses this
  convention.

No rank changes its box, so a gradient has the shape of its shard.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rvdcomm.errors import LayoutError
from rvdcomm.layout import RVD, Layout


def dual(layout: Layout) -> Layout:
    """The layout in which R and V are exchanged and every rank keeps its box.

    Laws (tests/plans/test_adjoint.py): ``dual(x).cell(rank).box == x.cell(rank).box``; with one
    replica or one part ``dual(dual(x)) == x``. If ``x`` has several replicas and several
    parts, each part of ``dual(x)`` takes one holder from every part of ``x``. There is more than
    one way to do so, since a layout does not say which replicas of different parts belong together.

    >>> str(dual(Layout((4, 6), "R(1)V(2)D(1,2)", ranks=[7, 5, 3, 1])))
    'R(2)V(1)D(1,2) shape(4,6) ranks(3,1,7,5)'
    """
    r, v, d = layout.rvd.r, layout.rvd.v, layout.rvd.d
    ranks = np.array(layout.ranks).reshape(r, v, -1).swapaxes(0, 1)
    return Layout(layout.shape, RVD(v, r, d), ranks.reshape(-1).tolist(), layout.cuts)


def copies(layout: Layout) -> Layout:
    """The layout in which every rank that holds a box holds a copy of it: ``R(r·v)V(1)``.

    >>> str(copies(Layout((4, 6), "R(2)V(2)D(1,1)")))
    'R(4)V(1)D(1,1) shape(4,6) ranks(0:4)'
    """
    rvd = RVD(layout.rvd.r * layout.rvd.v, 1, layout.rvd.d)
    return Layout(layout.shape, rvd, layout.ranks, layout.cuts)


def first_part(layout: Layout) -> Layout:
    """The holders of one value part alone, as a layout without parts."""
    rvd = RVD(layout.rvd.r, 1, layout.rvd.d)
    ranks = np.array(layout.ranks).reshape(layout.rvd.r, layout.rvd.v, -1)[:, 0]
    return Layout(layout.shape, rvd, ranks.reshape(-1).tolist(), layout.cuts)


def _parts_back(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    # With replicas and parts, the gradients of the replicas of any one part add up to the gradient
    # of the tensor. Gradients of replicas of different parts do not, so one part is read.
    is_mixed = dst.rvd.r > 1 and dst.rvd.v > 1
    return dual(first_part(dst) if is_mixed else dst), dual(src)


def _copies_back(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    return copies(dst), copies(src)


REPLICA_GRADS: dict[str, Callable[[Layout, Layout], tuple[Layout, Layout]]] = {
    "parts": _parts_back,
    "copies": _copies_back,
}
"""By convention for the gradients of replicas: from (src, dst) to the layouts of the gradients."""


def adjoint(src: Layout, dst: Layout, replica_grads: str = "parts") -> tuple[Layout, Layout]:
    """The src and the dst layout of the transition that takes the gradients of ``src -> dst`` back.

    >>> src, dst = Layout((6,), "R(1)V(1)D(3)"), Layout((6,), "R(3)V(1)D(1)")
    >>> [str(layout.rvd) for layout in adjoint(src, dst)]
    ['R(1)V(3)D(1)', 'R(1)V(1)D(3)']
    >>> [str(layout.rvd) for layout in adjoint(src, dst, "copies")]
    ['R(3)V(1)D(1)', 'R(1)V(1)D(3)']

    Raises:
        LayoutError: ``replica_grads`` is neither "parts" nor "copies".
    """
    check_replica_grads(replica_grads)
    return REPLICA_GRADS[replica_grads](src, dst)


def check_replica_grads(name: str) -> None:
    """Raise a LayoutError if no convention has this name."""
    if name not in REPLICA_GRADS:
        known = " or ".join(map(repr, REPLICA_GRADS))
        raise LayoutError(f"replica_grads={name!r} is unknown; use {known}.")
