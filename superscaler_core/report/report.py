"""Report: all communication of a step and the memory of all devices, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import rvdcomm as rv
from rvdcomm.units import bytes_text
from superscaler_core.graph.opaque import opaque_notes
from superscaler_core.grouped import grouped
from superscaler_core.materialize.events import schedule_of
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.memory.memory import DeviceMemory
from superscaler_core.plan import Device, Plan
from superscaler_core.precision import Precision
from superscaler_core.report.move import moves_of
from superscaler_core.report.rows import HEADER, Row, rows_of
from superscaler_core.report.table import numbers_text, table

TITLES = {
    "forward": "activations, forward",
    "backward": "gradients of activations",
    "fetch": "weights, to where they are read",
    "reduce": "gradients of weights, to where they are stored",
    "loss": "the loss, to all devices",
}
"""What moves, by the way of a move."""

WIDTH = 100


@dataclass(frozen=True)
class Report:
    """The communication of a plan in a step, and the memory of its devices; ``print`` it.

    Attributes:
        title: the model and the plan's size.
        rows: one row for each group of similar transfers, sorted by what they move.
        memory: the memory of every device.
        level_names: levels of the topology, from the innermost.
        notes: differences between what the plan computes and what the model computes.
        opaque: the ops that no plan can split, a line for each kind.
    """

    title: str
    rows: tuple[Row, ...]
    memory: Mapping[Device, DeviceMemory]
    level_names: tuple[str, ...]
    notes: tuple[str, ...]
    opaque: tuple[str, ...] = ()

    @property
    def level_bytes(self) -> dict[str, int]:
        """Bytes per step, over all ranks, by the highest level that they cross."""
        totals = [0] * len(self.level_names)
        for row in self.rows:
            # A topology of only the participating ranks has one level.
            for level, size in enumerate(row.level_bytes):
                totals[level] += size
        return dict(zip(self.level_names, totals, strict=True))

    @property
    def sent_bytes(self) -> int:
        """Bytes per step, over all ranks."""
        return sum(self.level_bytes.values())

    def of(self, way: str) -> tuple[Row, ...]:
        """The rows of one way: "forward", "backward", "fetch", "reduce" or "loss"."""
        return tuple(row for row in self.rows if row.first.way == way)

    def summary(self) -> str:
        """A few lines."""
        worst = max(self.memory, key=lambda device: self.memory[device].total_bytes)
        kinds = self.memory[worst].by_kind
        most = max(kinds, key=lambda kind: kinds[kind])
        total, share = bytes_text(sum(kinds.values())), bytes_text(kinds[most])
        levels = [f"{bytes_text(size)} between {n}s" for n, size in self.level_bytes.items()]
        lines = [
            self.title,
            f"sends     {', '.join(levels)} a step",
            f"memory    {total} at most, on device {worst}; most of it {most}, {share}",
            *(f"note      {note}" for note in self.notes),
            *(f"opaque    {line}" for line in self.opaque),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n\n".join([self.summary(), *self._sections(), self._memory_text()])

    def _sections(self) -> Iterator[str]:
        for way, title in TITLES.items():
            rows = self.of(way)
            if rows:
                total = bytes_text(sum(row.sent_bytes for row in rows))
                # Only edges have names of their own.
                skipped = 0 if way in ("forward", "backward") else 1
                cells = [row.cells()[skipped:] for row in rows]
                yield f"{title}: {total} a step\n{table(HEADER[skipped:], cells, WIDTH)}"

    def _memory_text(self) -> str:
        alike = grouped((memory, device) for device, memory in self.memory.items())
        cells = [
            [numbers_text(devices), *map(bytes_text, (*need.by_kind.values(), need.total_bytes))]
            for need, devices in alike.items()
        ]
        header = ["devices", *next(iter(self.memory.values())).by_kind, "total"]
        if any(need.host_bytes for need in alike):
            header.append("host")
            for row, need in zip(cells, alike, strict=True):
                row.append(bytes_text(need.host_bytes))
        return "memory\n" + table(header, cells, WIDTH)


def report_of(
    made: Materialized,
    plan: Plan,
    memory: Mapping[Device, DeviceMemory],
    topology: rv.Topology | None = None,
    precision: Precision = Precision(),
) -> Report:
    """The report of a plan.

    Args:
        made: the plan with its communication.
        plan: the plan as its owner has it, with further notes.
        memory: the result of ``memory.memory_of``.
        topology: hosts and links; one host with a port for every device if None.
        precision: the dtypes of the training.

    Raises:
        LayoutError: a device is not in the topology.
    """
    schedule = schedule_of(plan)
    routes = f", {plan.num_routes} routes" if plan.num_routes > 1 else ""
    return Report(
        f"{plan.graph.name}: {_count(len(plan.graph.ops), 'op')} on "
        f"{_count(len(plan.devices), 'device')}, {_count(plan.num_stages, 'stage')}, "
        f"{_count(plan.num_microbatches, 'microbatch', 'es')} ({schedule.name}{routes})",
        rows_of(moves_of(made, topology, precision)),
        memory,
        ("rank",) if topology is None else tuple(level.name for level in topology.levels),
        tuple(plan.notes),
        tuple(opaque_notes(plan.graph)),
    )


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}{ending if number != 1 else ''}"
