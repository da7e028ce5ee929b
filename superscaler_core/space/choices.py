"""Choices: the ways in which a group of ops may be cut on a mesh of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import rvdcomm as rv
from superscaler_core.graph.dims import DimClass, Dims
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.materialize.sharding import shardings_of
from superscaler_core.plan import Device, OpSplit
from superscaler_core.plans.pieces.storage import storage_among
from superscaler_core.space.groups import OpGroup

MeshSizes = tuple[int, ...]
"""Sizes of the axes of a mesh of devices; the last axis varies fastest."""

Cut = tuple[DimClass | None, ...]
"""For each axis of a mesh, the class of loops that is cut along it; None replicates."""

LONG = 16
"""A cut may be uneven if every piece has at least this many iterations: a device then has at most a
sixteenth more work than an even share."""


@dataclass(frozen=True)
class Choice:
    """One way to cut a group; groups whose ops have equal forms share it.

    Attributes:
        name: for every axis the loop that is cut and the number of pieces, such as ``b/8 -/4``.
        splits: the split of every op of the group, in order.
        is_recompute: whether the group keeps only what it reads, and runs again for its backward.
        has_pieces: whether devices that read the same part of a weight store a piece of this part
            each (ZeRO).
    """

    name: str
    splits: tuple[OpSplit, ...]
    is_recompute: bool = False
    has_pieces: bool = False

    def split_of(self, group: OpGroup) -> Mapping[Op, OpSplit]:
        """The split of every op of a group that takes this choice."""
        return dict(zip(group, self.splits, strict=True))

    def storage(self, graph: Graph, group: OpGroup) -> Mapping[PTensor, OpSplit]:
        """The storage of the group's weights that are not stored where they are read.

        A weight that several ops read stays where it is read.
        """
        found: dict[PTensor, OpSplit] = {}
        for op, split in self.split_of(group).items() if self.has_pieces else ():
            for position, tensor in enumerate(op.inputs):
                if tensor.kind != PARAMETER or len(graph.readers[tensor]) > 1:
                    continue
                holders: dict[rv.Box, list[Device]] = {}
                for device, shard in sorted(
                    shardings_of(op.form, split).inputs[position].shards.items()
                ):
                    holders.setdefault(shard.box, []).append(device)
                if tensor.requires_grad and max(map(len, holders.values())) > 1:
                    groups = {box: [devices] for box, devices in holders.items()}
                    found[tensor] = storage_among(graph.updates[tensor.name], groups)
        return found

    def options(
        self, graph: Graph, group: OpGroup, *, recompute_regions: bool, pieces: bool
    ) -> list[Choice]:
        """This choice, and its variants with recomputation and with weights in pieces.

        A group can be recomputed only if its ops are consecutive in the graph.
        """
        found = [self]
        if pieces:
            cut = replace(self, name=f"{self.name} zero", has_pieces=True)
            found += [cut] if cut.storage(graph, group) else []
        if recompute_regions and group[-1].index - group[0].index == len(group) - 1:
            found += [replace(x, name=f"{x.name} rerun", is_recompute=True) for x in found]
        return found


def choices_of(
    dims: Dims, group: OpGroup, devices: Sequence[Device], mesh: Sequence[int]
) -> tuple[Choice, ...]:
    """All ways to cut a group: along each axis of the mesh one class of loops, or none.

    An op that has no loop of the class is replicated along the axis. A class that is cut along
    several axes is cut into the product of their sizes. Two kinds of cuts are left out:

    - of a class that is in no parameter, and in no tensor that other groups read or write: if the
      ends of a group are whole, a cut inside it only adds communication;
    - uneven cuts, unless all loops of the class have one size and every piece has at least ``LONG``
      iterations, as in a vocabulary of 50,257 words.

    Args:
        dims: the classes of the graph's dims.
        group: ops of the graph.
        devices: the devices of the mesh; its last axis varies fastest.
        mesh: sizes of its axes.
    """
    names = _names(dims, group, _outer_classes(dims, group))
    found = []
    for cut in product(*((*names, None) if num > 1 else (None,) for num in mesh)):
        if not all(_is_even(dims, op, cut, mesh) for op in group):
            continue
        name = " ".join(
            f"{'-' if each is None else names[each]}/{num}"
            for each, num in zip(cut, mesh, strict=True)
        )
        cuts = [zip(_loops(dims, op, cut), mesh, strict=True) for op in group]
        splits = (
            OpSplit.grid(op.sizes, devices, [*each]) for op, each in zip(group, cuts, strict=True)
        )
        found.append(Choice(name, tuple(splits)))
    return tuple(found)


def _outer_classes(dims: Dims, group: OpGroup) -> tuple[DimClass, ...]:
    """The classes in parameters, and in tensors that other groups write or read."""
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
    """The name of each class: one of its loops, or its dim if the loop's name is taken."""
    # The last op with the most classes comes first, so that most names are loops of one op.
    ops = sorted(reversed(group), key=lambda op: -sum(bool(dims.ids(op, each)) for each in classes))
    names: dict[DimClass, str] = {}
    for each in classes:
        loop = next(dims.ids(op, each)[0] for op in ops if dims.ids(op, each))
        names[each] = str(each) if loop in names.values() else loop
    return names


def _loops(dims: Dims, op: Op, cut: Cut) -> list[str | None]:
    ids = [() if each is None else dims.ids(op, each) for each in cut]
    return [each[0] if each else None for each in ids]


def _is_even(dims: Dims, op: Op, cut: Cut, mesh: Sequence[int]) -> bool:
    """Whether a cut divides all loops of an op evenly, or nearly evenly where they are long."""
    counts: dict[str, int] = {}
    for loop, num in zip(_loops(dims, op, cut), mesh, strict=True):
        if loop is not None:
            counts[loop] = counts.get(loop, 1) * num
    return all(
        op.sizes[loop] % num == 0
        # Loops of several sizes, such as heads and features, would be cut at different places.
        or (op.sizes[loop] >= LONG * num and len(dims.sizes(dims.of_loop(op, loop))) == 1)
        for loop, num in counts.items()
    )
