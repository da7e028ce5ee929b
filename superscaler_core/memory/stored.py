"""StoredMemory: parameters and their gradients on a device, as the run time holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from superscaler_core.graph.tensor import ITEM_BYTES, PTensor
from superscaler_core.plan import Device
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.side import Side
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.weights import Use


class StoredMemory:
    """Adds up parameters, their copies and gradients.

    A parameter is *stored* in the master dtype, and read from a *copy* where box or dtype differ,
    or a window brings it. Gradients are added up at copies, in the dtype of storage, and reduced
    to storage at the step's end, or at the end of a window's backward. Where storage is on the
    host, what moves between devices is on the device as it passes.

    Args:
        made: the plan.
        master_dtype: of what is stored; the model's if None.
    """

    def __init__(self, made: Materialized, master_dtype: str | None = None) -> None:
        self._made, self.master_dtype = made, master_dtype
        self._shards: dict[Device, Mapping[PTensor, int]] = {}

    # --- what is there all the time -------------------------------------------------------------

    def shards(self, device: Device) -> Mapping[PTensor, int]:
        """Bytes that are stored, on the device or on its host, by parameter."""
        if device not in self._shards:
            self._shards[device] = {
                tensor: side.shards[device].box.num_elements * self._item_bytes(tensor)
                for tensor, side in self._made.weights.storage.items()
                if device in side.shards
            }
        return self._shards[device]

    def _item_bytes(self, tensor: PTensor) -> int:
        return ITEM_BYTES[self.master_dtype or tensor.dtype]

    def trained_bytes(self, device: Device) -> int:
        """Bytes that are stored on the device and that an optimizer changes."""
        return sum(self._here(self._trained(device)).values())

    def _here(self, sizes: Mapping[PTensor, int]) -> dict[PTensor, int]:
        """Those of parameters that are not stored on the host."""
        return {t: size for t, size in sizes.items() if not self._is_hosted(t)}

    def _is_hosted(self, tensor: PTensor) -> bool:
        return tensor.name in self._made.plan.on_host

    def host_bytes(self, device: Device, num_states: int) -> int:
        """Of what is stored on the host, its gradients and its states."""
        hosted = {t: size for t, size in self.shards(device).items() if self._is_hosted(t)}
        return sum(size * (1 + t.requires_grad * (1 + num_states)) for t, size in hosted.items())

    def _trained(self, device: Device) -> dict[PTensor, int]:
        return {t: size for t, size in self.shards(device).items() if t.requires_grad}

    def resting_bytes(self, device: Device) -> int:
        """Of what is stored, and copies that stay."""
        copies = sum(_copy_bytes(use, device) for use in self._resting(device))
        return sum(self._here(self.shards(device)).values()) + copies

    def passing_bytes(self, use: Use, device: Device) -> int:
        """Of what is stored on the host, on its way to other devices."""
        if not self._is_hosted(use.tensor) or device not in use.storage.shards:
            return 0
        return use.storage.shards[device].box.num_elements * ITEM_BYTES[use.tensor.dtype]

    def fetched_bytes(self, device: Device) -> int:
        """Of what communication brings to copies that stay, at the step's start: of one bucket."""
        most = 0
        for uses in self._buckets:
            # Those that only come from the host are copied one by one.
            copied = max((self.passing_bytes(u, device) for u in uses if not u.fetch), default=0)
            fetched = [use for use in uses if use.fetch and not use.is_fetched]
            arrived = sum(
                _copy_bytes(use, device) + self.passing_bytes(use, device) for use in fetched
            )
            most = max(most, copied, arrived)
        return most

    @cached_property
    def _buckets(self) -> list[list[Use]]:
        """Uses that are there all the time, as they move in one call each."""
        found: dict[int, list[Use]] = {}
        for use in self._made.weights.uses:
            if not use.is_fetched:
                found.setdefault(self._made.weights.bucket_of[use], []).append(use)
        return [found[number] for number in sorted(found)]

    def _resting(self, device: Device) -> list[Use]:
        """Copies besides storage that stay."""
        return [use for use in self._uses(device) if not use.is_fetched and not self._is_own(use)]

    def _uses(self, device: Device) -> list[Use]:
        return [use for use in self._made.weights.uses if device in use.side.shards]

    def _is_own(self, use: Use) -> bool:
        """Whether what is read is the stored tensor itself."""
        is_here = use.is_stored and not self._is_hosted(use.tensor)
        return is_here and self.master_dtype in (None, use.tensor.dtype)

    # --- gradients ------------------------------------------------------------------------------

    def arriving_bytes(self, device: Device) -> int:
        """The most beyond gradients of copies while they are reduced, at the step's end.

        Bucket by bucket, sums arrive where parameters are stored, and what they are of is dropped.
        """
        trained = self._trained(device)
        now = most = 0
        for uses in self._buckets:
            moved = [u for u in uses if u.window is None and u.tensor not in self._staying]
            arriving = {u.tensor: trained.get(u.tensor, 0) for u in moved}
            most = max(most, now + sum(arriving.values()))
            now += sum(self._here(arriving).values())
            now -= sum(self._grad_bytes(use, device) for use in moved)
        return most

    @cached_property
    def _staying(self) -> frozenset[PTensor]:
        """Parameters that are read where they are stored, by nobody else."""
        moved = {
            use.tensor
            for use in self._made.weights.uses
            if not use.is_stored or not all(leg.is_idle for leg in use.reduce)
        }
        return frozenset(self._made.weights.storage) - moved

    def fetches(self, device: Device) -> Iterable[Transfer]:
        """Communication of weights in which a device takes part."""
        for use in self._made.weights.uses:
            if _takes_part(device, use.side, use.storage):
                yield from use.fetch

    def reductions(self, device: Device) -> Iterable[Transfer]:
        """Communication of gradients in which a device takes part."""
        for use in self._made.weights.uses:
            if _takes_part(device, use.side, use.storage):
                dtype = self.master_dtype or use.tensor.dtype
                yield from (replace(leg, dtype=dtype) for leg in use.reduce)

    def _grad_bytes(self, use: Use, device: Device) -> int:
        """Of the sum of gradients of a copy."""
        shard = use.side.shards.get(device)
        if shard is None or not use.tensor.requires_grad:
            return 0
        return shard.box.num_elements * self._item_bytes(use.tensor)


def _copy_bytes(use: Use, device: Device) -> int:
    shard = use.side.shards.get(device)
    return 0 if shard is None else shard.box.num_elements * ITEM_BYTES[use.tensor.dtype]


def _takes_part(device: Device, *sides: Side) -> bool:
    return any(device in side.shards for side in sides)
