"""Prices: what ops, edges, parameters and stages take in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from superscaler_core.cost.memory_cost import MemoryCost, peak_bytes
from superscaler_core.cost.wire import CallSecs
from superscaler_core.plan import Device

MAX_PRICES = 1 << 18
"""Answers of each kind that are remembered. Ops of a form share them, and so do edges: of a GPT
with a hundred ways to split every op, all pairs of neighbours are some 100,000."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """What an op takes on the device that it keeps busy longest, in seconds a microbatch.

    Attributes:
        forward_secs: of the forward.
        backward_secs: of the backward, without a recomputation.
        accumulate_secs: of adding its weights' gradients to those of the microbatches before; in
            every backward but the first of a step.
    """

    forward_secs: float
    backward_secs: float
    accumulate_secs: float


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """What the way of a tensor to a reader takes, in seconds a microbatch.

    Attributes:
        forward_secs: of the value; 0 if every device has what it reads.
        backward_secs: of the gradient.
        num_calls: calls of communication of both, each of which ends a segment.
    """

    forward_secs: float
    backward_secs: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class SyncCost:
    """What a parameter takes once a step.

    Attributes:
        fetch: calls that bring it from where it is stored to where it is read.
        reduce: calls that bring its gradient back.
        update_secs: of the optimizer, on the device that stores most of it.
    """

    fetch: tuple[CallSecs, ...]
    reduce: tuple[CallSecs, ...]
    update_secs: float

    @property
    def secs(self) -> float:
        """Of this parameter alone; of several, ``together`` lets calls share their latency."""
        calls = sum(call.secs for call in (*self.fetch, *self.reduce))
        return calls + self.update_secs


@dataclass(frozen=True, slots=True)
class StageCost:
    """What ops that follow each other take together.

    Attributes:
        forward_secs, backward_secs: of a microbatch: of ops, and of what moves between them.
        accumulate_secs: in every backward but the first of a step.
        fetch, reduce: calls once a step, of all parameters.
        update_secs: of the optimizer.
        memory: of the ops, in order.
    """

    forward_secs: float
    backward_secs: float
    accumulate_secs: float
    fetch: tuple[CallSecs, ...]
    reduce: tuple[CallSecs, ...]
    update_secs: float
    memory: tuple[MemoryCost, ...]

    def step_secs(self, microbatches: int, call_secs: float = 0.0) -> float:
        """Seconds of a step of one stage.

        Args:
            microbatches: of the step.
            call_secs: as of ``together``.
        """
        secs = microbatches * (self.forward_secs + self.backward_secs)
        secs += (microbatches - 1) * self.accumulate_secs + self.update_secs
        return secs + together(self.fetch, call_secs) + together(self.reduce, call_secs)

    def device_bytes(self, *, microbatches: int = 1, in_flight: int = 1) -> int:
        """The most on a device, as of ``peak_bytes``, with weights and states."""
        resting = sum(each.resting_bytes for each in self.memory)
        return resting + peak_bytes(self.memory, microbatches=microbatches, in_flight=in_flight)


def together(calls: Iterable[CallSecs], call_secs: float = 0.0) -> float:
    """Seconds of calls of which those of the same devices are made as one.

    One call takes the longest latency of what it moves, and the bytes of all; calls of disjoint
    devices run at one time.

    Args:
        calls: such as the ``reduce`` of many parameters.
        call_secs: that a call takes besides (``DeviceProfile.move_secs``).
    """
    latency: dict[tuple[Device, ...], float] = {}
    moving: dict[tuple[Device, ...], float] = {}
    for call in calls:
        latency[call.devices] = max(latency.get(call.devices, 0.0), call.latency_secs)
        moving[call.devices] = moving.get(call.devices, 0.0) + call.bytes_secs
    busy: dict[Device, float] = {}
    for devices, secs in latency.items():
        for device in devices:
            busy[device] = busy.get(device, 0.0) + secs + moving[devices] + call_secs
    return max(busy.values(), default=0.0)
