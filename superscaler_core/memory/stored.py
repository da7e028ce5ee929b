"""StoredMemory: parameters and their gradients on a device, as the run time holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from superscaler_core.graph.tensor import ITEM_BYTES, PTensor
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.materialize.weights import Use
from superscaler_core.plan import Device
from superscaler_core.precision import Precision
from superscaler_core.program.verb import Phase, Verb


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes of the parameters that one device stores.

    Attributes:
        here_bytes, trained_bytes: on the device: all parameters, and the trained ones.
        hosted_bytes, hosted_trained_bytes: the same in its host's memory.
    """

    here_bytes: int = 0
    trained_bytes: int = 0
    hosted_bytes: int = 0
    hosted_trained_bytes: int = 0


def stored_by_device(
    storage: Mapping[PTensor, Sharding], hosted: Collection[str], precision: Precision
) -> Mapping[Device, StoredBytes]:
    """The parameters that each device stores, in bytes.

    Args:
        storage: where every parameter is stored.
        hosted: names of the parameters that are stored on the host.
        precision: the dtypes of the training.
    """
    # Most parameters are stored in the same way.
    alike = Counter((t.dtype, t.requires_grad, t.name in hosted, s) for t, s in storage.items())
    sums: dict[tuple[Device, bool, bool], int] = {}
    for (dtype, is_trained, is_hosted, sharding), count in alike.items():
        item_bytes = precision.item_bytes(dtype)
        for device, num_elements in sharding.num_elements.items():
            key = device, is_hosted, is_trained
            sums[key] = sums.get(key, 0) + count * num_elements * item_bytes
    return {
        device: StoredBytes(
            *(
                size
                for is_hosted in (False, True)
                for trained in [sums.get((device, is_hosted, True), 0)]
                for size in (trained + sums.get((device, is_hosted, False), 0), trained)
            )
        )
        for device in {device for device, _, _ in sums}
    }


class StoredMemory:
    """Adds up parameters, their copies and gradients.

    A parameter is *stored* in the master dtype. It is read from a *copy* if box or dtype differ, or
    if an FSDP unit gathers it. Gradients are accumulated at copies, in the dtype of storage, and
    reduced to storage at the step's end, or at the end of an FSDP unit's backward. If storage is on
    the host, tensors that move between devices pass through device memory.

    Args:
        made: the plan.
        precision: the dtypes of the training.
    """

    def __init__(self, made: Materialized, precision: Precision = Precision()) -> None:
        self._made, self.precision = made, precision
        self._hosted = made.plan.on_host

    @cached_property
    def uses(self) -> Mapping[str, Use]:
        """The uses of weights, by name."""
        return {use.name: use for use in self._made.weights.uses}

    # --- memory that exists all the time --------------------------------------------------------

    def shards(self, device: Device) -> Mapping[PTensor, int]:
        """Bytes that are stored, on the device or on its host, by parameter."""
        storage = self._made.weights.storage
        return {
            tensor: sharding.num_elements[device] * self.item_bytes(tensor)
            for tensor, sharding in storage.items()
            if device in sharding.num_elements
        }

    def item_bytes(self, tensor: PTensor) -> int:
        """Bytes of an element of a parameter where it is stored, and of its gradient."""
        return self.precision.item_bytes(tensor.dtype)

    @cached_property
    def by_device(self) -> Mapping[Device, StoredBytes]:
        """The parameters that each device stores; a missing device stores none."""
        return stored_by_device(self._made.weights.storage, self._hosted, self.precision)

    def _stored(self, device: Device) -> StoredBytes:
        return self.by_device.get(device) or StoredBytes()

    def trained_bytes(self, device: Device) -> int:
        """Bytes of trained parameters that are stored on the device."""
        return self._stored(device).trained_bytes

    def _is_hosted(self, tensor: PTensor) -> bool:
        return tensor.name in self._hosted

    def host_bytes(self, device: Device, num_states: int) -> int:
        """Bytes on the host: stored parameters, their gradients and states."""
        stored = self._stored(device)
        return stored.hosted_bytes + stored.hosted_trained_bytes * (1 + num_states)

    def resting_bytes(self, device: Device) -> int:
        """Bytes of stored parameters, and of copies that exist all the time."""
        copies = sum(copy_bytes(use, device) for use in self._resting(device))
        return self._stored(device).here_bytes + copies + self._older_bytes(device)

    def _older_bytes(self, device: Device) -> int:
        """Bytes of the versions of weights besides the newest."""
        made = self._made
        if not made.is_asynchronous or made.plan.schedule is None:
            return 0
        total = 0
        for stage, num_versions in enumerate(made.plan.schedule.versions_kept):
            mine = set(made.updated_in(stage))
            uses = [use for use in self._uses(device) if use.tensor in mine]
            # Stages on one device that share a stored weight share its versions.
            kept = {(use.tensor if self._is_own(use) else use): use for use in uses}.values()
            total += (num_versions - 1) * sum(copy_bytes(use, device) for use in kept)
        return total

    def passing_bytes(self, use: Use, device: Device) -> int:
        """Bytes of a parameter stored on the host while it moves to other devices."""
        if not self._hosted or not self._is_hosted(use.tensor):
            return 0
        return use.storage.num_elements.get(device, 0) * ITEM_BYTES[use.tensor.dtype]

    def fetched_bytes(self, device: Device) -> int:
        """Bytes that arrive for permanent copies at the step's start, one bucket at a time."""
        # Weights that come only from this device's host are copied one by one.
        most = max((self.passing_bytes(use, device) for use in self._alone), default=0)
        buckets = self._buckets_on.get((Verb.FETCH, device), [])
        for first in range(len(buckets)):
            uses = chain(*buckets[first : first + 1 + self._made.plan.overlap.prefetch])
            sizes = ((copy_bytes(u, device) + self.passing_bytes(u, device), n) for u, n in uses)
            most = max(most, sum(size * count for size, count in sizes))
        return most

    @cached_property
    def _alone(self) -> list[Use]:
        """Uses that exist all the time and need no other device."""
        return [use for use in self._made.weights.uses if not (use.fetch or use.is_fetched)]

    @cached_property
    def _buckets_on(self) -> Mapping[tuple[Verb, Device], list[list[tuple[Use, int]]]]:
        """The buckets of uses that calls fetch or reduce, by instruction kind and device.

        In the step's order; buckets that the device neither reads nor stores are left out. Uses of
        equal bytes, as equal layers have them, are one use with their number.
        """
        made = self._made
        blocks = [made.step_program.begin, made.step_program.end]
        if made.plan.overlap or made.is_asynchronous:
            blocks[1:1] = made.step_program.blocks.values()
        found: dict[tuple[Verb, Device], list[list[tuple[Use, int]]]] = {}
        for i in chain(*blocks):
            if i.phase is Phase.WAIT or not made.is_of_bucket(i):
                continue
            here: dict[Device, list[tuple[Use, int]]] = {}
            for alike in self._alike(made.uses_of(i)):
                use = alike[0]
                for device in use.sharding.num_elements.keys() | use.storage.num_elements.keys():
                    here.setdefault(device, []).append((use, len(alike)))
            for device, uses in here.items():
                found.setdefault((i.kind, device), []).append(uses)
        return found

    def _alike(self, uses: Iterable[Use]) -> Iterable[list[Use]]:
        """The uses in groups that have the same bytes on every device."""
        found: dict[Hashable, list[Use]] = {}
        for use in uses:
            tensor = use.tensor
            key = use.sharding, use.storage, tensor.dtype, use.is_trained, self._is_hosted(tensor)
            found.setdefault(key, []).append(use)
        return found.values()

    def _resting(self, device: Device) -> list[Use]:
        """Uses with a permanent copy besides storage."""
        return [use for use in self._uses(device) if not use.is_fetched and not self._is_own(use)]

    def _uses(self, device: Device) -> list[Use]:
        return self._read_on.get(device, [])

    @cached_property
    def _read_on(self) -> Mapping[Device, list[Use]]:
        """The uses that devices read."""
        found: dict[Device, list[Use]] = {}
        for use in self._made.weights.uses:
            for device in use.sharding.shards:
                found.setdefault(device, []).append(use)
        return found

    def _is_own(self, use: Use) -> bool:
        """Whether a use reads the stored tensor itself."""
        is_here = use.is_stored and not self._is_hosted(use.tensor)
        return is_here and self.precision.stored(use.tensor.dtype) == use.tensor.dtype

    # --- gradients ------------------------------------------------------------------------------

    def arriving_bytes(self, device: Device) -> int:
        """The most memory beyond gradients of copies while they are reduced, at the step's end.

        For each bucket, sums arrive where parameters are stored, and then the summands are dropped.
        If backwards run meanwhile, up to ``Overlap.most_reductions`` buckets arrive at a time.
        """
        buckets = self._buckets_on.get((Verb.REDUCE, device), [])
        at_once = self._made.plan.overlap.most_reductions
        coming = [
            [self.stored_grad_bytes(use, device) * count for use, count in uses] for uses in buckets
        ]
        sizes = list(map(sum, coming))
        now = most = 0
        for first, uses in enumerate(buckets):
            most = max(most, now + sum(sizes[first : first + at_once]))
            now += sum(
                size
                for (use, _), size in zip(uses, coming[first], strict=True)
                if not self._is_hosted(use.tensor)
            )
            now -= sum(self._grad_bytes(use, device) * count for use, count in uses)
        return most

    def handed_bytes(self, device: Device, stage: int) -> int:
        """The change in bytes of handed-over gradients at a stage's update.

        Gradients of weights that the stage borrows begin to wait for the owner's update; gradients
        that have waited for this update are freed.
        """
        by_stage = self._made.borrowers
        waiting = sum(self.stored_grad_bytes(use, device) for use in by_stage.get(stage, ()))
        uses = (use for mine in by_stage.values() for use in mine if use.owner == stage)
        return waiting - sum(self.stored_grad_bytes(use, device) for use in uses)

    def stored_grad_bytes(self, use: Use, device: Device) -> int:
        """Bytes of a gradient where the parameter is stored."""
        if not use.is_trained:
            return 0
        return use.storage.num_elements.get(device, 0) * self.item_bytes(use.tensor)

    def _grad_bytes(self, use: Use, device: Device) -> int:
        """Bytes of the accumulated gradient of a copy."""
        if not use.is_trained:
            return 0
        return use.sharding.num_elements.get(device, 0) * self.item_bytes(use.tensor)


def copy_bytes(use: Use, device: Device) -> int:
    """Bytes of what a device reads of a weight."""
    return use.sharding.num_elements.get(device, 0) * ITEM_BYTES[use.tensor.dtype]
