"""Memory: what a plan needs on every device, and whether the devices have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import rvdcomm as rv
from superscaler_core.errors import DeviceMemoryError, PlanError
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.side import Device
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.tensor import ITEM_BYTES
from superscaler_core.units import bytes_text
from superscaler_core.validate.activations import Activations
from superscaler_core.validate.stored import Stored

STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Optimizers by name, and how many numbers each keeps for an element, in the dtype of storage."""

_ADVICE = {
    "weights": "cut weights over more devices (tensor parallel), make more stages, or gather them "
    "for the ops that read them (plan.gather_weights, ZeRO 3)",
    "grads": "reduce them as soon as they are there (plan.reduce_grads, ZeRO 2)",
    "optimizer": "let several devices store a share each (parts of plan.update(name), ZeRO 1)",
    "activations": "recompute groups of ops (plan.recompute), or make microbatches smaller, or cut "
    "ops along the batch or the sequence",
    "buffers": "reduce gradients in windows (plan.reduce_grads), and cut what moves",
}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one device needs, at the moment of a step at which it needs most.

    Laws (tests/superscaler_core/test_memory.py): ZeRO's bytes a parameter (Rajbhandari et al.,
    2020) with gradients in the dtype of storage, as Megatron-LM has them: 18, 6 + 12/N, 2 + 16/N
    and 16/N for a model in bfloat16 that is stored in float32 and trained with Adam.

    Attributes:
        weights_bytes: what is stored, copies in another form, and windows that are open at once.
        grads_bytes: of copies, of storage that windows have reduced to, and of open windows.
        optimizer_bytes: states of what is stored.
        activations_bytes: of all microbatches in flight, and of one recomputation.
        buffers_bytes: constants, and staging of the largest communication; or, if it is more, what
            weights that come at a step's start, or gradients that go at its end, need beyond the
            room that activations (and gradients) leave then.
    """

    weights_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of every kind."""
        return {
            "weights": self.weights_bytes,
            "grads": self.grads_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
            "buffers": self.buffers_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """Of all kinds."""
        return sum(self.by_kind.values())

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in self.by_kind.items())
        return f"{bytes_text(self.total_bytes)} ({kinds})"


def memory_of(
    made: Materialized, *, optimizer: str = "adam", master_dtype: str | None = None
) -> dict[Device, DeviceMemory]:
    """What every device of a plan needs.

    Not counted: temporaries inside an op, gradients of activations, and what an allocator loses.

    Args:
        made: the plan.
        optimizer: one of ``STATES``.
        master_dtype: of stored parameters, as ``load`` takes it; the model's if None.

    Raises:
        PlanError: the optimizer or the dtype is not known.
        OrderError: the schedule cannot run.
    """
    return _Account(made, optimizer, master_dtype).all()


def check_memory(
    made: Materialized,
    limit_bytes: int,
    *,
    optimizer: str = "adam",
    master_dtype: str | None = None,
) -> dict[Device, DeviceMemory]:
    """As ``memory_of``; refuse a plan that needs more than ``limit_bytes`` on some device.

    Raises:
        DeviceMemoryError: names the device that lacks most, what it needs by kind, its largest
            tensors, and what would need less.
    """
    account = _Account(made, optimizer, master_dtype)
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


class _Account:
    """Adds up what devices hold."""

    def __init__(self, made: Materialized, optimizer: str, master_dtype: str | None) -> None:
        _check_known("optimizer", optimizer, STATES)
        if master_dtype is not None:
            _check_known("dtype", master_dtype, ITEM_BYTES)
        self._made, self._num_states = made, STATES[optimizer]
        self._stored = Stored(made, master_dtype)
        self._activations = Activations(made)
        self._beyond: dict[tuple[rv.Layout, rv.Layout, str], int] = {}
        constants = {t for op in made.plan.graph.ops for t in op.inputs if t.kind == "constant"}
        self._constant_bytes = sum(tensor.num_bytes for tensor in constants)

    def all(self) -> dict[Device, DeviceMemory]:
        """Of all devices."""
        return {device: self._memory(device) for device in self._made.plan.devices}

    def tensors(self, device: Device) -> dict[str, int]:
        """Bytes by tensor: of what is stored with its states, and of what is in flight."""
        stored = {
            f"{t.name} (parameter)": size * (1 + self._num_states * t.requires_grad)
            for t, size in self._stored.shards(device).items()
        }
        return stored | self._activations.tensors(device)

    def _memory(self, device: Device) -> DeviceMemory:
        stored = self._stored
        activations = self._activations.num_bytes(device)
        grads = stored.grads_bytes(device)
        during = self._staging_bytes(self._edge_legs(device))
        at_end = stored.arriving_bytes(device) + self._staging_bytes(stored.reductions(device))
        at_start = stored.fetched_bytes(device)
        return DeviceMemory(
            weights_bytes=stored.weights_bytes(device),
            grads_bytes=grads,
            optimizer_bytes=self._num_states * stored.trained_bytes(device),
            activations_bytes=activations,
            buffers_bytes=self._constant_bytes
            + max(during, at_end - activations, at_start - activations - grads),
        )

    def _edge_legs(self, device: Device) -> Iterable[Transfer]:
        for edge in self._made.edges.all:
            if device in edge.devices:
                yield from (*edge.forward, *edge.backward)

    def _staging_bytes(self, legs: Iterable[Transfer]) -> int:
        """Memory besides the shards at both ends that the largest transfer needs."""
        moving = {leg for leg in legs if not leg.is_idle}
        return max(map(self._beyond_shards, moving), default=0)

    def _beyond_shards(self, leg: Transfer) -> int:
        # Devices meet the same transfers, and layers that are alike do.
        key = leg.src, leg.dst, leg.dtype
        if key not in self._beyond:
            plan = leg.plan(self._made.topology)
            # The least that any plan needs is its shards.
            self._beyond[key] = max(0, plan.cost.peak_bytes - plan.bound.peak_bytes)
        return self._beyond[key]


def _check_known(what: str, given: str, known: Mapping[str, object]) -> None:
    if given not in known:
        near = get_close_matches(given, known, 3, 0.3) or list(known)
        raise PlanError(f"{what} {given!r} is not known; there are {', '.join(near)}.")
