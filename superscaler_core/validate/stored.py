"""Stored: the memory of parameters and their gradients on a device, as the run time holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sequence import Close, Open
from superscaler_core.materialize.side import Device, Side
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.materialize.weights import Use
from superscaler_core.tensor import ITEM_BYTES, PTensor


class Stored:
    """Adds up parameters, their copies and gradients.

    A parameter is *stored* in the master dtype, and read from a *copy* where box or dtype differ,
    or a window brings it. Gradients are added up at copies, in the dtype of storage, and reduced
    to storage at the step's end, or at the end of a window's backward.

    Args:
        made: the plan.
        master_dtype: of what is stored; the model's if None.
    """

    def __init__(self, made: Materialized, master_dtype: str | None = None) -> None:
        self._made, self._master = made, master_dtype
        self._windowed = {use.tensor for use in made.weights.uses if use.window is not None}

    # --- what is there all the time -------------------------------------------------------------

    def shards(self, device: Device) -> dict[PTensor, int]:
        """Bytes that are stored, by parameter."""
        return {
            tensor: side.shards[device].box.num_elements * self._item_bytes(tensor)
            for tensor, side in self._made.weights.storage.items()
            if device in side.shards
        }

    def _item_bytes(self, tensor: PTensor) -> int:
        return ITEM_BYTES[self._master or tensor.dtype]

    def trained_bytes(self, device: Device) -> int:
        """Bytes that are stored and that an optimizer changes."""
        return sum(self._trained(device).values())

    def _trained(self, device: Device) -> dict[PTensor, int]:
        return {t: size for t, size in self.shards(device).items() if t.requires_grad}

    def weights_bytes(self, device: Device) -> int:
        """Of what is stored, copies that stay, and windows that are open at one time."""
        resting = sum(_copy_bytes(use, device) for use in self._resting(device))
        return sum(self.shards(device).values()) + resting + self.opened_bytes(device)

    def opened_bytes(self, device: Device) -> int:
        """The most at one time of copies that windows bring."""
        return self._open_bytes(device, lambda u, d: _copy_bytes(u, d) if u.is_fetched else 0)

    def fetched_bytes(self, device: Device) -> int:
        """Of copies that stay and that communication fills at the step's start."""
        return sum(_copy_bytes(use, device) for use in self._resting(device) if use.fetch)

    def _resting(self, device: Device) -> list[Use]:
        """Copies besides storage that stay."""
        return [use for use in self._uses(device) if not use.is_fetched and not self._is_own(use)]

    def _uses(self, device: Device) -> list[Use]:
        return [use for use in self._made.weights.uses if device in use.side.shards]

    def _is_own(self, use: Use) -> bool:
        """Whether what is read is the stored tensor itself."""
        return use.is_stored and self._master in (None, use.tensor.dtype)

    # --- gradients ------------------------------------------------------------------------------

    def grads_bytes(self, device: Device) -> int:
        """Before the step's end: of copies, of storage that windows reduce to, of open windows."""
        copies = sum(
            self._grad_bytes(use, device) for use in self._uses(device) if use.window is None
        )
        reduced = sum(s for t, s in self._trained(device).items() if t in self._windowed)
        return copies + reduced + self._open_bytes(device, self._grad_bytes)

    def arriving_bytes(self, device: Device) -> int:
        """At the step's end: of storage, where it is not the copy's gradient as it is."""
        return sum(
            size
            for tensor, size in self._trained(device).items()
            if tensor not in self._windowed and tensor not in self._staying
        )

    @cached_property
    def _staying(self) -> frozenset[PTensor]:
        """Parameters that are read where they are stored, by nobody else."""
        moved = {
            use.tensor
            for use in self._made.weights.uses
            if not use.is_stored or not all(leg.is_idle for leg in use.reduce)
        }
        return frozenset(self._made.weights.storage) - moved

    def reductions(self, device: Device) -> Iterable[Transfer]:
        """Communication of gradients in which a device takes part."""
        for use in self._made.weights.uses:
            if _takes_part(device, use.side, use.storage):
                dtype = self._master or use.tensor.dtype
                yield from (replace(leg, dtype=dtype) for leg in use.reduce)

    def _grad_bytes(self, use: Use, device: Device) -> int:
        """Of the sum of gradients of a copy."""
        shard = use.side.shards.get(device)
        if shard is None or not use.tensor.requires_grad:
            return 0
        return shard.box.num_elements * self._item_bytes(use.tensor)

    def _open_bytes(self, device: Device, size_of: Callable[[Use, Device], int]) -> int:
        """The most at one time of what uses have while their window is open."""
        most = 0
        for items in self._windows:
            now = 0
            for item in items:
                size = sum(size_of(u, device) for u in self._made.uses_of.get(item.window, ()))
                now += size if isinstance(item, Open) else -size
                most = max(most, now)
        return most

    @cached_property
    def _windows(self) -> list[list[Open | Close]]:
        """What comes and goes in every stage, in order."""
        return [[i for i in items if isinstance(i, Open | Close)] for items in self._made.items]


def _copy_bytes(use: Use, device: Device) -> int:
    shard = use.side.shards.get(device)
    return 0 if shard is None else shard.box.num_elements * ITEM_BYTES[use.tensor.dtype]


def _takes_part(device: Device, *sides: Side) -> bool:
    return any(device in side.shards for side in sides)
