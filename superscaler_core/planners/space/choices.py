"""Choices: the ways in which a group of ops may be cut on a mesh of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from superscaler_core.graph.dims import DimClass, Dims
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PARAMETER
from superscaler_core.plan import Device, OpSplit
from superscaler_core.planners.space.groups import OpGroup

Cut = tuple[DimClass | None, ...]
"""For each axis of a mesh the class of loops that is cut along it; None replicates."""


@dataclass(frozen=True)
class Choice:
    """One way to cut a group; groups whose ops have equal forms share it.

    Attributes:
        name: for every axis the loop that is cut and the number of pieces, such as ``b/8 -/4``.
        splits: of every op of the group, in order.
    """

    name: str
    splits: tuple[OpSplit, ...]


def choices_of(
    dims: Dims, group: OpGroup, devices: Sequence[Device], mesh: Sequence[int]
) -> tuple[Choice, ...]:
    """All ways to cut a group: along each axis of the mesh one class of loops, or none.

    An op that has no loop of the class is replicated along the axis. A class that is cut along
    several axes is cut into the product of their sizes. Left out are classes of no loop of a
    parameter, or of a tensor that other groups read or write: to cut inside a group what is whole
    at its ends only adds communication; and cuts that do not divide all loops of the class evenly.

    Args:
        dims: of the graph.
        group: ops of the graph.
        devices: of the mesh; its last axis varies fastest.
        mesh: sizes of its axes.
    """
    names = _names(dims, group, _outer_classes(dims, group))
    found = []
    for cut in product((*names, None), repeat=len(mesh)):
        if not all(_divides(dims, op, cut, mesh) for op in group):
            continue
        name = " ".join(
            f"{'-' if each is None else names[each]}/{num}"
            for each, num in zip(cut, mesh, strict=True)
        )
        found.append(Choice(name, tuple(_split(dims, op, cut, devices, mesh) for op in group)))
    return tuple(found)


def _outer_classes(dims: Dims, group: OpGroup) -> tuple[DimClass, ...]:
    """The classes of parameters, and of tensors that other groups write or read."""
    inside, graph = set(group), dims.graph
    found: dict[DimClass, None] = {}
    for op in group:
        outer = [
            tensor
            for tensor in op.inputs
            if tensor.kind == PARAMETER or graph.producer.get(tensor) not in inside
        ]
        outer += [
            tensor
            for tensor in op.outputs
            if any(reader not in inside for reader, _ in graph.readers.get(tensor, ()))
        ]
        having = {each for tensor in outer for each in dims.of_tensor(tensor)}
        loops = (loop for loop, size in op.sizes.items() if size > 1 and op.is_splittable(loop))
        for each in (dims.of_loop(op, loop) for loop in loops):
            if each in having:
                found[each] = None
    return tuple(found)


def _names(dims: Dims, group: OpGroup, classes: Iterable[DimClass]) -> Mapping[DimClass, str]:
    """A class by its loop in the first op that has it, or by its dim if that name is taken."""
    names: dict[DimClass, str] = {}
    for each in classes:
        loop = next(dims.ids(op, each)[0] for op in group if dims.ids(op, each))
        names[each] = str(each) if loop in names.values() else loop
    return names


def _loops(dims: Dims, op: Op, cut: Cut) -> list[str | None]:
    ids = [() if each is None else dims.ids(op, each) for each in cut]
    return [each[0] if each else None for each in ids]


def _divides(dims: Dims, op: Op, cut: Cut, mesh: Sequence[int]) -> bool:
    """Whether a cut divides all loops of an op evenly."""
    counts: dict[str, int] = {}
    for loop, num in zip(_loops(dims, op, cut), mesh, strict=True):
        if loop is not None:
            counts[loop] = counts.get(loop, 1) * num
    return all(op.sizes[loop] % num == 0 for loop, num in counts.items())


def _split(dims: Dims, op: Op, cut: Cut, devices: Sequence[Device], mesh: Sequence[int]) -> OpSplit:
    return OpSplit.grid(op.sizes, devices, list(zip(_loops(dims, op, cut), mesh, strict=True)))
