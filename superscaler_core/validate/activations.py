"""Activations: what devices hold of the microbatches that are in flight."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from superscaler_core.codegen.segments import stage_steps
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.side import Device
from superscaler_core.materialize.steps import Run
from superscaler_core.validate.held import Held, held_of


class Activations:
    """Adds up what stages hold, over the order of forwards and backwards of every device."""

    def __init__(self, made: Materialized) -> None:
        self._made = made

    def num_bytes(self, device: Device) -> int:
        """The most at one time: stages in flight, and what one backward computes again."""
        held = self.held[device]
        now = most = 0
        for run in self._runs[device]:
            if run.kind == "F":
                now += held[run.stage].num_bytes
                most = max(most, now)
            else:
                most = max(most, now + held[run.stage].again_bytes)
                now -= held[run.stage].num_bytes
        return most

    def in_flight(self, device: Device) -> dict[int, int]:
        """The most microbatches that a device holds at one time, by stage."""
        now: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for run in self._runs[device]:
            now[run.stage] += 1 if run.kind == "F" else -1
            most[run.stage] = max(most[run.stage], now[run.stage])
        return dict(most)

    def tensors(self, device: Device) -> dict[str, int]:
        """Bytes by tensor, in all microbatches in flight."""
        found: Counter[str] = Counter()
        for stage, count in self.in_flight(device).items():
            for storage in self.held[device][stage].storages:
                found[f"{storage.name} ({count} in flight)"] += storage.num_bytes * count
        return dict(found)

    @cached_property
    def held(self) -> dict[Device, dict[int, Held]]:
        """What one microbatch holds, by device and stage."""
        found: dict[Device, dict[int, Held]] = {d: {} for d in self._made.plan.devices}
        for stage in self._made.plan.stages:
            for device, steps in stage_steps(self._made, stage.index).items():
                found[device][stage.index] = held_of(self._made, device, steps)
        return found

    @cached_property
    def _runs(self) -> dict[Device, list[Run]]:
        """Forwards and backwards of every device, in order."""
        return {
            device: [e for e in events if isinstance(e, Run) and e.kind in ("F", "B")]
            for device, events in self._made.events_on.items()
        }
