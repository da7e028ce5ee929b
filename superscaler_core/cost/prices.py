"""Prices: the times of ops, edges, parameters and stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from superscaler_core.cost.comm_cost import CallSecs
from superscaler_core.cost.memory_cost import MemoryCost, peak_bytes
from superscaler_core.plan import Device

MAX_PRICES = 1 << 18
"""Bound on cached results of each kind. Equal ops and edges share them: a GPT with a hundred ways
to split every op has some 100,000 pairs of neighbouring splits."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """The time of an op on its slowest device, in seconds per microbatch, without recomputation.

    Adding its weights' gradients to those of earlier microbatches (``accumulate_secs``) takes place
    in every backward except the first of a step.
    """

    forward_secs: float
    backward_secs: float
    accumulate_secs: float


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """The seconds per microbatch of moving a value to a reader, and its gradient back.

    They are 0 if every device has what it reads. Each of the calls of both ends a segment.
    """

    forward_secs: float
    backward_secs: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class SyncCost:
    """The time of a parameter once per step.

    Calls fetch it from storage to its readers, and reduce its gradient back. The optimizer takes
    ``update_secs`` on the device that stores most of it.
    """

    fetch: tuple[CallSecs, ...]
    reduce: tuple[CallSecs, ...]
    update_secs: float

    @property
    def secs(self) -> float:
        """Seconds for this parameter alone; ``together`` merges calls of several parameters."""
        calls = sum(call.secs for call in (*self.fetch, *self.reduce))
        return calls + self.update_secs


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of consecutive ops.

    Attributes:
        forward_secs, backward_secs: time per microbatch of ops and of moves between them.
        accumulate_secs: additional time in every backward except the first of a step.
        fetch, reduce: calls once per step, of all parameters.
        update_secs: time of the optimizer.
        memory: the memory costs of the ops, in order.
    """

    forward_secs: float
    backward_secs: float
    accumulate_secs: float
    fetch: tuple[CallSecs, ...]
    reduce: tuple[CallSecs, ...]
    update_secs: float
    memory: tuple[MemoryCost, ...]

    def step_secs(self, microbatches: int, call_secs: float = 0.0) -> float:
        """Seconds of a step of one stage; ``call_secs`` is as in ``together``."""
        secs = microbatches * (self.forward_secs + self.backward_secs)
        secs += (microbatches - 1) * self.accumulate_secs + self.update_secs
        return secs + together(self.fetch, call_secs) + together(self.reduce, call_secs)

    def device_bytes(self, *, microbatches: int = 1, in_flight: int = 1) -> int:
        """The peak on a device, as in ``peak_bytes``, including weights and optimizer states."""
        resting = sum(each.resting_bytes for each in self.memory)
        return resting + peak_bytes(self.memory, microbatches=microbatches, in_flight=in_flight)


def together(calls: Iterable[CallSecs], call_secs: float = 0.0) -> float:
    """Seconds of calls, where calls of the same devices are merged into one.

    A merged call takes the longest latency of its tensors, and the time of the bytes of all, with
    ``call_secs`` (``DeviceProfile.move_secs``) for each; calls of disjoint devices run at the same
    time.
    """
    latency: dict[tuple[Device, ...], float] = {}
    moving: dict[tuple[Device, ...], float] = {}
    for call in calls:
        latency[call.devices] = max(latency.get(call.devices, 0.0), call.latency_secs)
        moving[call.devices] = moving.get(call.devices, 0.0) + call.bytes_secs + call_secs
    busy: dict[Device, float] = {}
    for devices, secs in latency.items():
        for device in devices:
            busy[device] = busy.get(device, 0.0) + secs + moving[devices]
    return max(busy.values(), default=0.0)
