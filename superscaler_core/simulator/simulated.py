"""Simulated: the result of a simulation, as tables for people, and for files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from rvdcomm.units import bytes_text, secs_text
from superscaler_core.cost.comm_cost import HOST_NAME
from superscaler_core.plan import Device
from superscaler_core.report.table import numbers_text, table
from superscaler_core.simulator.account import Account
from superscaler_core.simulator.picture import draw
from superscaler_core.simulator.trace import save_trace

WIDTH = 98


class Simulated(Account):
    """One simulated training step; print it. Its figures are those of ``Account``."""

    def __str__(self) -> str:
        lines = [*_head(self), "", _times(self), "", _levels(self), "", _memory(self)]
        over = [d for d, size in self.peak_bytes.items() if size > self.memory_bytes]
        if over:
            memory = bytes_text(self.memory_bytes)
            lines.append(f"out of memory: devices {numbers_text(over)} have {memory}")
        notes = [
            fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ")
            for text in self.assumptions
        ]
        return "\n".join([*lines, "", "assumptions", *notes])

    def summary(self) -> str:
        """Time, bubble and peak memory, in a few lines."""
        device = max(self.memory, key=lambda device: self.peak_bytes[device])
        kinds = {kind: size for kind, size in self.memory[device].items() if kind != "host"}
        most = max(kinds, key=lambda kind: kinds[kind])
        return "\n".join([
            *_head(self),
            f"memory {bytes_text(self.peak_bytes[device])} at most, on device {device}; most of it "
            f"{most}, {bytes_text(kinds[most])}",
        ])  # fmt: skip

    def save_trace(self, path: str | Path) -> None:
        """Write the step in Chrome's trace format, for chrome://tracing and Perfetto."""
        save_trace(self, path)

    def draw(self, path: str | Path) -> None:
        """Write a picture: devices over time, and their memory below.

        Raises:
            PlanError: matplotlib is missing, or cannot write this suffix.
        """
        draw(self, path)


def _head(found: Account) -> tuple[str, str]:
    share = f"{found.overlap:.1%}" if any(level.secs for level in found.levels) else "-"
    return (
        found.headline,
        f"bubble of makespan {found.bubble_of_makespan:.1%}, of ideal "
        f"{found.bubble_of_ideal:.1%}, of span {found.bubble_of_span:.1%}; "
        f"communication hidden {share}",
    )


def _times(found: Account) -> str:
    times = (found.compute_secs, found.communication_secs, found.bubble_secs)
    rows = {
        device: _time_cells([time[device] for time in times], found.secs)
        for device in found.devices
    }
    mean = _time_cells([sum(time.values()) / len(time) for time in times], found.secs)
    header = ["devices", "compute", "communication", "bubble", "computing"]
    return table(header, [*_merged(rows), ["mean", *mean]])


def _time_cells(secs: list[float], total_secs: float) -> tuple[str, ...]:
    return (*map(secs_text, secs), f"{secs[0] / total_secs:.1%}")


def _levels(found: Account) -> str:
    rows = [
        [lv.name, bytes_text(lv.sent_bytes), secs_text(lv.secs), secs_text(lv.exposed_secs)]
        for lv in found.levels
        if lv.sent_bytes or lv.name != HOST_NAME
    ]
    return table(["level", "sent", "time a device", "exposed"], rows)


def _memory(found: Account) -> str:
    kinds = list(dict.fromkeys(kind for memory in found.memory.values() for kind in memory))
    rows = {
        device: tuple(
            bytes_text(size)
            for size in (*(memory.get(k, 0) for k in kinds), found.peak_bytes[device])
        )
        for device, memory in found.memory.items()
    }
    return table(["devices", *kinds, "peak"], _merged(rows))


def _merged(rows: Mapping[Device, tuple[str, ...]]) -> list[list[str]]:
    alike: dict[tuple[str, ...], list[Device]] = {}
    for device, cells in rows.items():
        alike.setdefault(cells, []).append(device)
    return [[numbers_text(devices), *cells] for cells, devices in alike.items()]
