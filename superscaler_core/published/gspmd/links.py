"""Links: which loop of an op is cut with a dim of its tensor, and when specs pass along a loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Op
from superscaler_core.graph.shard_spec import Axes
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.plan.mesh import Mesh

MAX_FORMS = 1 << 12
"""Bound on the op forms whose links are kept; ops of one form share them."""

Specs = Mapping[str, tuple[Axes, ...]]
"""For every tensor, by name, the axes of each dim."""


@dataclass(frozen=True, slots=True)
class DimLink:
    """A dim of an operand, and the loop of the op that is cut with it.

    Attributes:
        operand: number of the operand, inputs first.
        dim: dim of the operand's tensor.
        loop: loop of the op; all pieces of the loop are pieces of the dim.
        sizes: sizes of the dim and of the loop.
    """

    operand: int
    dim: int
    loop: str
    sizes: tuple[int, int]

    def fitting(self, axes: Axes, mesh: Mesh) -> Axes:
        """The longest prefix of the axes that cuts dim and loop at the same places."""
        dim, loop = self.sizes
        for count in range(len(axes), 0, -1):
            num = mesh.num_pieces(axes[:count])
            if num <= min(dim, loop) and (dim == loop or dim % num == loop % num == 0):
                return axes[:count]
        return ()


@lru_cache(maxsize=MAX_FORMS)
def links_of(form: OpForm) -> tuple[DimLink, ...]:
    """The links of all ops of a form, by operand and dim."""
    return tuple(_links(form))


def _links(form: OpForm) -> Iterator[DimLink]:
    sizes = form.sizes_of
    tensors = (*form.inputs, *form.outputs)
    for number, (of, operand) in enumerate(zip(tensors, form.annotation.operands, strict=True)):
        for dim, ids in enumerate(operand):
            loops = (ids.loop,) if isinstance(ids, SlidingWindow) else ids
            # Cutting a dim means cutting its outermost loop, as in ``graph.dims``.
            outer = next((loop for loop in loops if sizes[loop] > 1), None)
            if outer is not None and outer not in form.uncut:
                yield DimLink(number, dim, outer, (of.shape[dim], sizes[outer]))


NUM_PRIORITIES = 3


@lru_cache(maxsize=MAX_FORMS)
def priorities(form: OpForm) -> Mapping[str, int]:
    """The priority of every loop of an op: specs pass along loops of priority 0 first.

    Priority 0 has all loops of ops that sum over none, such as elementwise ops, views and softmax.
    For other ops, priority 1 has the loops that are not summed over, such as the batch of a
    product. Priority 2 has the loops that are summed over; along these, specs pass from one operand
    to another.

    Source: Xu et al., GSPMD, 2021, whose priorities are of ops and directions, not of loops.
    """
    sums = form.annotation.reductions
    return {loop: 2 if loop in sums else 1 if sums else 0 for loop in form.sizes_of}


def wanted(op: Op, specs: Specs, mesh: Mesh) -> dict[str, dict[Axes, str]]:
    """For every loop of an op the axes that its tensors' specs want, each with one such tensor."""
    tensors = (*op.inputs, *op.outputs)
    found: dict[str, dict[Axes, str]] = {}
    for link in links_of(op.form):
        name = tensors[link.operand].name
        axes = link.fitting(specs[name][link.dim], mesh)
        if axes:
            found.setdefault(link.loop, {}).setdefault(axes, name)
    return found


def merged(axes: Iterable[Axes]) -> list[Axes]:
    """The axes of one loop, without prefixes of other entries; one entry if all are compatible."""
    found = list(dict.fromkeys(axes))
    return [a for a in found if not any(a != b and b[: len(a)] == a for b in found)]
