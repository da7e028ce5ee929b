"""WeightStore: what a rank stores of the parameters, and the copies that its segments read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.run.moves import Shard, move_many
from superscaler_core.run.tables import Tables, Weight
from superscaler_core.run.transport import Transport


class WeightStore:
    """The parameters of one rank.

    A *stored* parameter is what the optimizer sees: this rank's box of it, by its single-device
    name. A *copy* is what segments read, and where autograd leaves gradients; it is the stored
    tensor itself where box and dtype are the same.

    Args:
        tables: of the rank's file.
        transport: moves copies and gradients.
        dtype: of what is stored (master weights); that of the model if None.
        device: where tensors live.
    """

    def __init__(
        self,
        tables: Tables,
        transport: Transport,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._tables, self._transport = tables, transport
        self.stored: dict[str, nn.Parameter] = {}
        for name, entry in tables.parameters.items():
            if entry.box is not None:
                kind = _dtype(entry.dtype) if dtype is None else dtype
                shard = torch.zeros(rv.Box.parse(entry.box).shape, dtype=kind, device=device)
                self.stored[name] = nn.Parameter(shard, requires_grad=entry.is_trained)
        self._copies: dict[str, Tensor] = {
            name: self._made(weight, device)
            for name, weight in tables.weights.items()
            if weight.box
        }
        self._totals: dict[str, Tensor] = {}
        self._resting = [n for n, w in tables.weights.items() if w.windowed != "gather"]
        self._unwindowed = [n for n, w in tables.weights.items() if not w.windowed]
        for name in set(tables.weights) - set(self._resting):
            self.drop([name])

    def _made(self, weight: Weight, device: torch.device | str) -> Tensor:
        entry = self._tables.parameters[weight.name]
        dtype = _dtype(weight.dtype)
        stored = self.stored.get(weight.name)
        is_stored = not weight.fetch and weight.windowed != "gather"
        if is_stored and stored is not None and stored.dtype == dtype:
            return stored
        assert weight.box is not None
        copy = torch.zeros(rv.Box.parse(weight.box).shape, dtype=dtype, device=device)
        return copy.requires_grad_(entry.is_trained)

    def copy(self, name: str) -> Tensor:
        """What segments read."""
        return self._copies[name]

    def shard(self, parameter: str) -> Shard | None:
        """What is stored here of a parameter."""
        box = self._tables.parameters[parameter].box
        return None if box is None else (self.stored[parameter].data, rv.Box.parse(box))

    # --- values ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Bring all copies that stay up to date, and put gradients of earlier steps aside."""
        for name, stored in self.stored.items():
            if stored.grad is not None:
                self._totals[name] = stored.grad
                stored.grad = None
        self._fetch(self._resting)

    def gather(self, names: Iterable[str]) -> None:
        """Fill copies that a window drops when it ends."""
        chosen = list(names)
        for name in chosen:
            copy = self._copies.get(name)
            if copy is not None:
                copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        self._fetch(chosen)

    def drop(self, names: Iterable[str]) -> None:
        """Free the memory of copies; autograd keeps them as names of what is gathered again."""
        for name in names:
            copy = self._copies.get(name)
            if copy is not None:
                copy.untyped_storage().resize_(0)

    def _fetch(self, names: Iterable[str]) -> None:
        moves = {}
        for name in names:
            weight, copy = self._tables.weights[name], self._copies.get(name)
            stored = self.stored.get(weight.name)
            if weight.fetch:
                moves[name] = weight.fetch, self._value(weight)
            elif copy is not None and stored is not None and copy is not stored:
                copy.data.copy_(stored.data)
        for name, box, result in move_many(self._transport, moves):
            held = self._tables.weights[name].box
            assert held is not None
            self._copies[name].data[box.slices_within(rv.Box.parse(held))] = result

    def _value(self, weight: Weight) -> Shard | None:
        """What is stored here of a weight, in the dtype in which it is read."""
        shard = self.shard(weight.name)
        return None if shard is None else (shard[0].to(_dtype(weight.dtype)), shard[1])

    # --- gradients ------------------------------------------------------------------------------

    def reduce(self, names: Iterable[str]) -> None:
        """Take gradients of copies to where the parameters are stored, and add them up there."""
        chosen = [name for name in names if self._tables.weights[name].reduce]
        moves = {name: (self._tables.weights[name].reduce, self._grad(name)) for name in chosen}
        for name, box, result in move_many(self._transport, moves):
            self._add(self._tables.weights[name].name, box, result)
        for name in chosen:
            if name in self._copies:
                self._copies[name].grad = None

    def _grad(self, name: str) -> Shard | None:
        """What autograd left here; zeros if nothing reached the copy."""
        box = self._tables.weights[name].box
        if box is None:
            return None
        copy = self._copies[name]
        held = rv.Box.parse(box)
        if copy.grad is None:
            return torch.zeros(held.shape, dtype=copy.dtype, device=copy.device), held
        return copy.grad, held

    def _add(self, parameter: str, box: rv.Box, grad: Tensor) -> None:
        stored, entry = self.stored[parameter], self._tables.parameters[parameter]
        assert entry.box is not None
        held = rv.Box.parse(entry.box)
        total = self._totals.get(parameter)
        if total is None and box == held:
            self._totals[parameter] = grad.to(stored.dtype)
            return
        if total is None:
            total = self._totals[parameter] = torch.zeros_like(stored.data)
        total[box.slices_within(held)] += grad

    def end(self) -> None:
        """Reduce what no window has reduced, and leave all gradients where optimizers look."""
        self.reduce(self._unwindowed)
        for name, stored in self.stored.items():
            stored.grad = self._totals.pop(name, None)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
