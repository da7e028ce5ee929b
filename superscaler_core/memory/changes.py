"""Changes: how each event of a step changes the memory of a device, in the device's order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from superscaler_core.memory.account import Peak
from superscaler_core.memory.footprint import Footprint
from superscaler_core.memory.step_memory import Letter, StepMemory, Walk
from superscaler_core.plan import Device
from superscaler_core.program.event import P2PSend
from superscaler_core.schedules import Action, ActionKind

BEGIN, END = "begin", "end"
"""The work before all runs of stages, and after them."""


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """What one event does to the memory of a device; all figures are bytes.

    Attributes:
        event: a run of a stage or an update, a P2P send whose value arrives, or ``BEGIN``, ``END``.
        freed_bytes: freed when the event begins: values that others have sent and it reads.
        peaks: for every step of a run, its peak and the memory after it, both in addition to what
            is held when the run has begun; one for another event.
        net_bytes: the difference that the event makes in all.
    """

    event: Action | P2PSend | str
    freed_bytes: int
    peaks: tuple[Peak, ...]
    net_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryChanges:
    """The memory of a device over the events of a step.

    Law (tests/superscaler_core/memory/test_changes.py): ``most_bytes`` is the total of
    ``memory_of``, unless two runs are woven, for which ``memory_of`` has a bound.

    Attributes:
        resting_bytes: what exists all the time: parameters, optimizer states, constants, staging.
        changes: in the order of the device.
    """

    resting_bytes: int
    changes: Sequence[MemoryChange]

    @property
    def most_bytes(self) -> int:
        """The peak, if every event ends before the next one begins."""
        now = most = self.resting_bytes
        for change in self.changes:
            begun = now - change.freed_bytes
            most = max(most, *(begun + peak.most_bytes for peak in change.peaks))
            now += change.net_bytes
        return most


def changes_on(steps: StepMemory, device: Device, states_bytes: int) -> MemoryChanges:
    """The changes on a device that stores so many bytes of optimizer states."""
    resting_bytes = steps.resting(device).total + states_bytes
    return MemoryChanges(resting_bytes, steps.walked(device, _NotedWalk).changes)


class _NotedWalk(Walk):
    """A walk that notes every change."""

    def __init__(self, footprints: Mapping[tuple[ActionKind, int], Footprint]) -> None:
        super().__init__(footprints)
        self.changes: list[MemoryChange] = []

    def begin(self, arriving_bytes: int) -> None:
        super().begin(arriving_bytes)
        self._note(BEGIN, self.now_bytes, arriving_bytes)

    def run(self, run: Action, read: Iterable[Letter]) -> None:
        letters = {*read}
        footprint, _, is_first = self.about(run)
        before, freed = self.now_bytes, sum(self.mail.get(letter, 0) for letter in letters)
        super().run(run, letters)
        peaks = footprint.first_peaks if is_first else footprint.peaks
        net_bytes = self.now_bytes - before
        self.changes.append(MemoryChange(run, freed, peaks or (Peak.of_bytes(0, 0),), net_bytes))

    def update(
        self, event: Action, copies: Collection[str], arriving_bytes: int, handed_bytes: int
    ) -> None:
        before = self.now_bytes
        super().update(event, copies, arriving_bytes, handed_bytes)
        self._note(event, before, arriving_bytes)

    def p2p_send(self, letter: Letter, device: Device) -> None:
        before = self.now_bytes
        super().p2p_send(letter, device)
        if self.now_bytes != before:
            edge, microbatch, is_back = letter
            self._note(P2PSend(edge.name, microbatch, is_back), before, self.now_bytes - before)

    def end(self, arriving_bytes: int) -> None:
        before = self.now_bytes
        super().end(arriving_bytes)
        # What was kept is gone before gradients arrive.
        freed = before - self.now_bytes
        self.changes.append(MemoryChange(END, freed, (Peak.of_bytes(arriving_bytes, 0),), -freed))

    def _note(self, event: Action | P2PSend | str, before: int, most_bytes: int) -> None:
        net_bytes = self.now_bytes - before
        self.changes.append(
            MemoryChange(event, 0, (Peak.of_bytes(most_bytes, net_bytes),), net_bytes)
        )
