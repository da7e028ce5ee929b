"""Price: what an op costs under a cut, given the specs of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import rvdcomm as rv
from superscaler_core.cost import CostModel
from superscaler_core.graph.graph import Op
from superscaler_core.graph.shard_spec import Axes
from superscaler_core.graph.tensor import ACTIVATION, PARAMETER, PTensor
from superscaler_core.materialize.sharding import Sharding, shardings_of
from superscaler_core.plan import Device, OpSplit
from superscaler_core.plan.mesh import Mesh
from superscaler_core.published.gspmd.links import Specs, merged, wanted

Cut = tuple[tuple[str, Axes], ...]
"""The loops of an op that are cut, by name, with their axes."""


@dataclass(frozen=True)
class Conflict:
    """An op whose tensors want more than one cut, and the prices that decide.

    Attributes:
        op: name of the op.
        wants: for each wanted cut of a loop, such as ``k@y``, a tensor that wants it.
        prices: all priced cuts with their seconds, the cheapest first; the first one is taken.
    """

    op: str
    wants: tuple[tuple[str, str], ...]
    prices: tuple[tuple[Cut, float], ...]

    def __str__(self) -> str:
        wants = " and ".join(f"{cut} (of {tensor})" for cut, tensor in self.wants)
        prices = ", ".join(f"{cut_text(cut)} {1e6 * secs:.2f} us" for cut, secs in self.prices)
        return f"{self.op}: {wants} cannot all be; by price: {prices}"


def cut_text(cut: Cut) -> str:
    """A cut as specs are written: ``b@x, k@y``."""
    return ", ".join(f"{loop}@{'*'.join(axes)}" for loop, axes in cut) or "whole"


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of the ops of a graph on a mesh.

    Attributes:
        costs: the cost functions of the graph.
        mesh: the mesh of the devices.
        devices: the devices; the last axis of the mesh varies fastest.
    """

    costs: CostModel
    mesh: Mesh
    devices: Sequence[Device]

    def chosen(self, op: Op, specs: Specs) -> tuple[Cut, Conflict | None]:
        """How an op is cut, given the specs of its tensors; and the conflict, if there was one.

        Every axis cuts the loop that its tensors want it to cut. If one axis is wanted by two
        loops, or tensors want incompatible axes for one loop, all combinations are priced,
        including those that leave an axis out.
        """
        wants = wanted(op, specs, self.mesh)
        loops: dict[str, list[str]] = {}
        for loop, found in wants.items():
            for axis in dict.fromkeys(axis for axes in found for axis in axes):
                loops.setdefault(axis, []).append(loop)
        unclear = {loop for loop, found in wants.items() if len(merged(found)) > 1}
        unclear |= {loop for at in loops.values() if len(at) > 1 for loop in at}
        if not unclear:
            return tuple(sorted((loop, merged(found)[0]) for loop, found in wants.items())), None
        cuts = sorted(set(self._cuts(op, wants, loops, unclear)))
        # Among equal prices the first cut in sorted order is taken, whatever the order of ops.
        prices = sorted((self.price(op, cut, specs), cut) for cut in cuts)
        said = [
            (cut_text(((loop, axes),)), tensor)
            for loop in sorted(unclear)
            for axes, tensor in sorted(wants[loop].items())
        ]
        return prices[0][1], Conflict(op.name, tuple(said), tuple((c, p) for p, c in prices))

    def _cuts(
        self,
        op: Op,
        wants: Mapping[str, Mapping[Axes, str]],
        loops: Mapping[str, Sequence[str]],
        unclear: set[str],
    ) -> Iterator[Cut]:
        """All ways to give every axis to one of the loops that want it, or to none."""
        options = [[*at, *([""] if unclear.intersection(at) else [])] for at in loops.values()]
        for taken in product(*options):
            cut = []
            for loop, found in wants.items():
                mine = {axis for axis, at in zip(loops, taken, strict=True) if at == loop}
                order = dict.fromkeys(a for axes in sorted(found, key=_longest) for a in axes)
                axes = tuple(axis for axis in order if axis in mine)
                if axes:
                    cut.append((loop, axes))
            if all(self.mesh.num_pieces(axes) <= op.sizes[loop] for loop, axes in cut):
                yield tuple(sorted(cut))

    def price(self, op: Op, cut: Cut, specs: Specs) -> float:
        """Seconds of an op, forward and backward, with the moves of its tensors.

        Activations are moved from and to the places that their specs say; a parameter is stored as
        its spec says. Gradients of parameters are summed once. Memory has no price.
        """
        split = self.split(op, cut)
        time = self.costs.op_cost(op, split)
        secs = time.forward_secs + time.backward_secs
        sides = shardings_of(op.form, split)
        for position, (tensor, side) in enumerate(zip(op.inputs, sides.inputs, strict=True)):
            if tensor.kind == ACTIVATION:
                secs += self._move(tensor, self.side(tensor, specs), side)
            if tensor.kind == PARAMETER:
                storage = self.storage(tensor, specs) if any(specs[tensor.name]) else None
                reader = (op, position)
                secs += self.costs.sync_cost(tensor, split, storage=storage, reader=reader).secs
        for tensor, side in zip(op.outputs, sides.outputs, strict=True):
            secs += self._move(tensor, side, self.side(tensor, specs))
        return secs

    def _move(self, tensor: PTensor, src: Sharding, dst: Sharding) -> float:
        cost = self.costs.move_cost(tensor, src, dst)
        return cost.forward_secs + cost.backward_secs

    def split(self, op: Op, cut: Cut) -> OpSplit:
        """The parts of an op."""
        return self.mesh.split(op.sizes, dict(cut), self.devices)

    def storage(self, tensor: PTensor, specs: Specs) -> OpSplit:
        """The split of an op whose loops are the dims of a tensor, such as the tensor's update."""
        sizes = {f"d{dim}": size for dim, size in enumerate(tensor.shape)}
        cuts = {f"d{dim}": axes for dim, axes in enumerate(specs[tensor.name]) if axes}
        return self.mesh.split(sizes, cuts, self.devices)

    def side(self, tensor: PTensor, specs: Specs) -> Sharding:
        """The boxes of a tensor on all devices, according to its spec."""
        views = []
        for part in self.storage(tensor, specs).parts:
            ranges = {loop: (lo, hi) for loop, lo, hi in part.pieces}
            bounds = [ranges.get(f"d{dim}", (0, size)) for dim, size in enumerate(tensor.shape)]
            box = rv.Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))
            assert part.device is not None, "the parts of a mesh have devices"
            views.append((part.device, box, ()))
        return Sharding.of(views)


def _longest(axes: Axes) -> tuple[int, Axes]:
    return -len(axes), axes
