"""Memory: the memory that a plan needs on every device, and whether the devices have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rvdcomm.collector import paused_collector
from rvdcomm.units import bytes_text
from superscaler_core.checks import one_of
from superscaler_core.errors import DeviceMemoryError
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.memory.changes import MemoryChanges, changes_on
from superscaler_core.memory.footprint import alike_devices
from superscaler_core.memory.held import tensors_in_flight
from superscaler_core.memory.step_memory import StepMemory
from superscaler_core.memory.step_peaks import StepPeaks
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Device
from superscaler_core.precision import Precision

T = TypeVar("T")

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""For each optimizer, its states per element, in the dtype of stored parameters."""

"""Dtypes of stored parameters: those that optimizers update."""

_ADVICE = {
    "weights": "cut weights over more devices (tensor parallel), make more stages, or gather them "
    "for the ops that read them (plan.unshard, ZeRO 3)",
    "grads": "reduce them as soon as they are there (plan.reduce_grads, ZeRO 2)",
    "optimizer": "let several devices store a share each (parts of plan.update(name), ZeRO 1), "
    "or store them on the host (plan.store_on_host)",
    "activations": "recompute groups of ops (plan.recompute), offload them to the host "
    "(plan.offload), or make microbatches smaller, or cut ops along the batch or the sequence",
    "buffers": "reduce gradients in FSDP units (plan.reduce_grads), and cut what moves",
}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device at the moment of a step at which it is largest.

    Laws (tests/superscaler_core/memory/test_memory.py): ZeRO's bytes per parameter (Rajbhandari et
    al., 2020), with gradients in the dtype of storage, as in Megatron-LM: 18, 6 + 12/N, 2 + 16/N
    and 16/N for a model in bfloat16 that is stored in float32 and trained with Adam.

    Attributes:
        weights_bytes: stored parameters, copies in another form, and weights of open FSDP units.
        grads_bytes: gradients of copies, gradients that FSDP units reduced to storage, and
            gradients in open FSDP units.
        optimizer_bytes: optimizer states of stored parameters.
        activations_bytes: activations of all microbatches in flight, and the values of running
            segments: results, their gradients, recomputed values, and gradients of weights that
            are not accumulated yet.
        buffers_bytes: constants, staging buffers, and arrived values that are not read yet:
            activations from other stages, weights at a step's start, gradients at its end.
        host_bytes: host memory, not included above: parameters stored there with their gradients
            and states, and offloaded activations.
        staging_bytes: the part of ``buffers_bytes`` that ``rvdcomm`` uses to stage its largest
            transfer.
    """

    weights_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    host_bytes: int = 0
    staging_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """The bytes that ``run.LiveBytes`` sees in a step: no optimizer states and no staging."""
        return self.total_bytes - self.optimizer_bytes - self.staging_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes on the device, by kind."""
        return {
            "weights": self.weights_bytes,
            "grads": self.grads_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
            "buffers": self.buffers_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """Bytes on the device, of all kinds."""
        return sum(self.by_kind.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in self.by_kind.items())
        host = f", and {bytes_text(self.host_bytes)} on the host" if self.host_bytes else ""
        return f"{bytes_text(self.total_bytes)} ({kinds}){host}"


@paused_collector()
def memory_of(
    made: Materialized, *, optimizer: str = "adam", precision: Precision = Precision()
) -> dict[Device, DeviceMemory]:
    """The memory that every device of a plan needs.

    It is the memory of a step if gradients were freed before it (``zero_grad``). Not included: the
    caller's batch, temporary memory of kernels and of an optimizer, and fragmentation.

    Args:
        made: the plan.
        optimizer: one of ``STATES``.
        precision: the dtypes of the training.

    Raises:
        PlanError: the optimizer or the dtype is not known.
        OrderError: the schedule cannot run.
    """
    _check(optimizer, precision)
    key = "memory", optimizer, precision
    return dict(made.known.of(key, lambda: _Account(made, optimizer, precision).all()))


@paused_collector()
def step_peaks_of(
    made: Materialized, *, optimizer: str = "adam", precision: Precision = Precision()
) -> dict[Device, StepPeaks]:
    """The peaks of all steps on every device; arguments and errors as for ``memory_of``."""
    return _Account(made, optimizer, precision).peaks()


@paused_collector()
def changes_of(
    made: Materialized, *, optimizer: str = "adam", precision: Precision = Precision()
) -> dict[Device, MemoryChanges]:
    """How every event changes the memory of a device; arguments and errors as ``memory_of``."""
    return _Account(made, optimizer, precision).changes()


@paused_collector()
def check_memory(
    made: Materialized,
    limit_bytes: int,
    *,
    optimizer: str = "adam",
    precision: Precision = Precision(),
) -> dict[Device, DeviceMemory]:
    """Like ``memory_of``; refuse a plan that needs more than ``limit_bytes`` on any device.

    Raises:
        DeviceMemoryError: names the device that exceeds the limit most, its memory by kind, its
            largest tensors, and how to reduce the largest kind.
    """
    account = _Account(made, optimizer, precision)
    found = account.all()
    worst = max(found, key=lambda device: found[device].total_bytes)
    need = found[worst]
    if need.total_bytes <= limit_bytes:
        return found
    num_over = sum(memory.total_bytes > limit_bytes for memory in found.values())
    kind = max(need.by_kind, key=lambda kind: need.by_kind[kind])
    largest = sorted(account.tensors(worst).items(), key=lambda entry: -entry[1])[:3]
    raise DeviceMemoryError(
        f"device {worst} needs {need}, but the limit is {bytes_text(limit_bytes)}"
        + (f"; so do {num_over - 1} others. " if num_over > 1 else ". ")
        + f"Its largest: {', '.join(f'{name} {bytes_text(size)}' for name, size in largest)}. "
        f"Most of it is {kind}: {_ADVICE[kind]}."
    )


def _check(optimizer: str, precision: Precision) -> None:
    one_of("optimizer", optimizer, STATES)
    Precision.of(precision)


class _Account:
    """Adds up the memory of devices."""

    def __init__(self, made: Materialized, optimizer: str, precision: Precision) -> None:
        _check(optimizer, precision)
        self._made, self._num_states = made, STATES[optimizer]
        self._stored = StoredMemory(made, precision)
        self._steps = StepMemory(made, self._stored)

    def all(self) -> dict[Device, DeviceMemory]:
        """The memory of all devices."""
        return self._of_all(self._memory)

    def peaks(self) -> dict[Device, StepPeaks]:
        """The peaks of the steps of all devices."""
        return self._of_all(lambda device: self._steps.peaks(device, self._states_bytes(device)))

    def changes(self) -> dict[Device, MemoryChanges]:
        """The changes of the memory of all devices."""
        return self._of_all(lambda d: changes_on(self._steps, d, self._states_bytes(d)))

    def _of_all(self, find: Callable[[Device], T]) -> dict[Device, T]:
        """What is found for each device; devices that are alike share it."""
        alike = alike_devices(self._made, self._stored.precision)
        found = {device: mine for group in alike for mine in [find(group[0])] for device in group}
        return {device: found[device] for device in self._made.plan.devices}

    def tensors(self, device: Device) -> dict[str, int]:
        """Bytes by tensor: stored parameters with their states, and activations in flight."""
        stored = {
            f"{t.name} (parameter)": size * (1 + self._num_states * t.requires_grad)
            for t, size in self._stored.shards(device).items()
            if t.name not in self._made.plan.on_host
        }
        return stored | tensors_in_flight(self._made, device)

    def _memory(self, device: Device) -> DeviceMemory:
        worst, stored = self._steps.worst(device), self._stored
        return DeviceMemory(
            weights_bytes=worst.moment.weights,
            grads_bytes=worst.moment.grads,
            optimizer_bytes=self._states_bytes(device),
            activations_bytes=worst.moment.activations,
            buffers_bytes=worst.moment.buffers,
            host_bytes=stored.host_bytes(device, self._num_states) + worst.host_bytes,
            staging_bytes=worst.staging_bytes,
        )

    def _states_bytes(self, device: Device) -> int:
        return self._num_states * self._stored.trained_bytes(device)
