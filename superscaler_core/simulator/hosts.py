"""Hosts: when the host of each device is free to issue its next kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from superscaler_core.cost.comm_cost import ticks
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.plan import Device


class Hosts:
    """The hosts of devices, one each; times are ticks from the step's start.

    A host issues the kernels of its device in order and does not wait for them, so it may be ahead
    of the device by any time. If the runtime makes it wait (``host_waits``), it is never ahead of
    an action.
    """

    def __init__(self, devices: Iterable[Device], profile: DeviceProfile) -> None:
        self._free = dict.fromkeys(devices, 0)
        self._issue, self._action = ticks(profile.issue_secs), ticks(profile.action_secs)
        self._waits = profile.host_waits

    def begin(self, devices: Sequence[Device], ready: Sequence[int], num_actions: int) -> list[int]:
        """When hosts begin to issue so many actions for devices that can begin at ``ready``."""
        for device, tick in zip(devices, ready, strict=True):
            if self._waits:
                self._free[device] = max(self._free[device], tick)
            self._free[device] += self._action * num_actions
        return [self._free[device] for device in devices]

    def issued(self, device: Device, duration: int, end: int) -> int:
        """A host has issued work, which ends at ``end``; when the device is free for more."""
        self._free[device] += duration
        if self._waits:
            self._free[device] = end = max(end, self._free[device])
        return end

    def call(self, devices: Sequence[Device]) -> int:
        """The hosts issue a P2P send; the tick at which the last has done so."""
        for device in devices:
            self._free[device] += self._issue
        return max(self._free[device] for device in devices)

    @property
    def end(self) -> int:
        """When the last host has issued everything."""
        return max(self._free.values())
