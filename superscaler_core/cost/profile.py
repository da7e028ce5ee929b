"""DeviceProfile: the speed and memory of a device, given or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.units import bytes_text

FILE_VERSION = 1
"""Version of the JSON that ``DeviceProfile.save`` writes."""

PRODUCTS, BYTES = "products", "bytes"
"""Keys of ``efficiency``: for ops without an entry of their own, and for memory."""


@dataclass(frozen=True)
class DeviceProfile:
    """The simulator's data about one device; all devices of a plan are equal.

    Laws (tests/superscaler_core/simulator/test_simulator_profile.py): ``load`` returns what
    ``save`` wrote; a device that is twice as fast in all respects takes half the time for every op.

    Attributes:
        name: name for people.
        flops_per_sec: peak of matrix products, by dtype.
        bytes_per_sec: peak of its memory.
        memory_bytes: size of its memory.
        host_bytes_per_sec: between its memory and the host's, one direction.
        host_memory_bytes_per_sec: this device's share of the host memory's bandwidth.
        launch_secs: overhead of every op.
        efficiency: share of the peaks that is reached: ``"products"`` of flops, ``"bytes"`` of
            memory, and any op kind, such as ``"attention"``, of flops; an *assumption*. 1 if left
            out.
        segment_secs: overhead of every call of a segment.
        move_secs: overhead of every communication call, in addition to its plan's time.
        op_secs: measured times, ``{signature: (forward_secs, backward_secs)}``, which are used
            instead of all the above (``op_time.signature``).
        notes: where the figures come from.
    """

    name: str
    flops_per_sec: Mapping[str, float]
    bytes_per_sec: float
    memory_bytes: int
    host_bytes_per_sec: float = 16e9
    host_memory_bytes_per_sec: float = 19e9
    launch_secs: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    segment_secs: float = 0.0
    move_secs: float = 0.0
    op_secs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        speeds = {
            **{f"flops_per_sec of {dtype}": value for dtype, value in self.flops_per_sec.items()},
            **{f"efficiency of {kind}": value for kind, value in self.efficiency.items()},
            "bytes_per_sec": self.bytes_per_sec,
            "host_bytes_per_sec": self.host_bytes_per_sec,
            "host_memory_bytes_per_sec": self.host_memory_bytes_per_sec,
            "memory_bytes": self.memory_bytes,
        }
        times = {"launch_secs", "segment_secs", "move_secs"}
        bad = [f"{what} is {value}" for what, value in speeds.items() if not value > 0]
        bad += [f"{t} is {getattr(self, t)}" for t in sorted(times) if not getattr(self, t) >= 0]
        bad += [f"efficiency of {k} is {v}, above 1" for k, v in self.efficiency.items() if v > 1]
        if bad:
            raise PlanError(
                f"profile {self.name}: {'; '.join(bad)}; speeds are above 0, times at least 0, "
                "efficiencies at most 1."
            )

    def flops_of(self, dtype: str, kind: str) -> float:
        """Operations per second that an op of a kind reaches.

        Raises:
            PlanError: the profile has no speed for this dtype.
        """
        if dtype not in self.flops_per_sec:
            raise PlanError(
                f"profile {self.name} has no flops_per_sec of {dtype}; it has "
                f"{', '.join(self.flops_per_sec)}."
            )
        share = self.efficiency.get(kind, self.efficiency.get(PRODUCTS, 1.0))
        return self.flops_per_sec[dtype] * share

    @property
    def reached_bytes_per_sec(self) -> float:
        """Memory bandwidth that is reached."""
        return self.bytes_per_sec * self.efficiency.get(BYTES, 1.0)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions behind a result, one per line."""
        peaks = ", ".join(f"{v / 1e12:.4g} {dtype}" for dtype, v in self.flops_per_sec.items())
        shares = ", ".join(f"{share:.3g} of {kind}" for kind, share in self.efficiency.items())
        lines = [
            f"device {self.name}: peak TFLOP/s {peaks}; memory {bytes_text(self.memory_bytes)}",
            f"GB/s of memory {self.bytes_per_sec / 1e9:.4g}, to the host "
            f"{self.host_bytes_per_sec / 1e9:.4g}, of the host's memory "
            f"{self.host_memory_bytes_per_sec / 1e9:.4g}",
            f"efficiency assumed: {shares or 'all of the peaks'}; "
            f"launch of an op {1e6 * self.launch_secs:.3g} us",
        ]
        if self.op_secs:
            lines.append(
                f"{len(self.op_secs)} op shapes measured, others by the roofline; a segment takes "
                f"{1e6 * self.segment_secs:.3g} us, one that communicates "
                f"{1e6 * self.move_secs:.3g} us more"
            )
        return (*lines, *self.notes)

    # --- files ----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write this profile as JSON, which ``load`` reads.

        Raises:
            PlanError: a figure is infinite, which JSON cannot represent.
            OSError: the file cannot be written.
        """
        try:
            text = json.dumps({"version": FILE_VERSION, **asdict(self)}, indent=1, allow_nan=False)
        except ValueError:
            raise PlanError(f"profile {self.name}: an infinite figure cannot be saved.") from None
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Read a profile that ``save`` wrote.

        Raises:
            PlanError: the file is not a profile.
            OSError: the file cannot be read.
        """
        try:
            values = json.loads(Path(path).read_text())
            if not isinstance(values, dict) or values.pop("version", None) != FILE_VERSION:
                raise TypeError(f"it is no JSON object of version {FILE_VERSION}")
            return cls(**_checked(values))
        except (ValueError, TypeError, PlanError) as error:
            raise PlanError(f"{path} is not a device profile: {str(error).rstrip('.')}.") from None


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """The checked fields of a profile, from plain values."""
    known = {each.name for each in fields(DeviceProfile)}
    if set(values) - known:
        raise TypeError(f"it has the unknown entries {', '.join(sorted(set(values) - known))}")
    for name, value in values.items():
        kind = _KINDS.get(name, (int, float))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    for name in ("flops_per_sec", "efficiency"):
        for key, number in values.get(name, {}).items():
            if not isinstance(number, int | float):
                raise TypeError(f"{name} of {key} is {str(number)[:40]!r}")
    table = {}
    for key, pair in values.get("op_secs", {}).items():
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(x, int | float) and x >= 0 for x in pair):
            raise TypeError(f"op_secs of {key[:80]!r} is no pair of seconds")
        table[key] = (pair[0], pair[1])
    return {**values, "op_secs": table, "notes": tuple(map(str, values.get("notes", ())))}


_KINDS: Mapping[str, Any] = {
    "name": str,
    "flops_per_sec": dict,
    "efficiency": dict,
    "op_secs": dict,
    "notes": list,
}
