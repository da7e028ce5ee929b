"""DeviceProfile: the speed and memory of a device, given or measured."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rvdcomm.units import bytes_text
from rvdcomm.whole_file import write_whole
from superscaler_core.cost.collective import Collective
from superscaler_core.cost.reach import FULL, Reach
from superscaler_core.errors import PlanError

FILE_VERSION = 2
"""Version of the JSON that ``DeviceProfile.save`` writes."""

MAX_FILE_BYTES = 1 << 20
"""A measured profile takes some KiB."""

FUSED = "attention"
"""The kind of ops with shares of their own: attention in one kernel, which writes no scores."""

NOT_NEGATIVE = (
    "p2p_secs", "issue_secs", "action_secs", "launch_secs", "move_secs", "num_cores",
    "segment_secs", "split_secs", "wake_secs",
)  # fmt: skip
"""Fields that may be 0."""


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
        launch_secs: overhead of every op, on the device.
        issue_secs: time in which the host issues a kernel or a call of communication; the device
            executes them in that order, at the earliest when they are issued. 0 if the host is
            never late. Only ``simulate`` reads it.
        action_secs: time of the host before every action of a stage, outside of its ops.
        host_waits: whether hosts wait for their devices before and after every action of a stage.
        products: the share of ``flops_per_sec`` that ops reach, by dtype and by the operations of
            one product with its batch; all of it for a dtype that is left out.
        attention: the same for fused attention; as ``products`` for a dtype that is left out.
        memory: the share of ``bytes_per_sec`` that ops reach, by the bytes that they move.
        segment_secs: overhead of every call of a segment.
        move_secs: overhead of every tensor that is moved, in addition to its plan's time.
        p2p_secs: overhead of every tensor that is sent between stages, in addition to
            ``move_secs``, on each of its devices.
        split_secs: overhead of every op whose backward is split into halves for its inputs and for
            its weights, in the second half.
        wake_secs: time from the end of a wait until the device continues, in which it does
            nothing; at most as long as it has waited.
        num_cores: cores that all devices share, each working on one; 0 if each has its own. It may
            be less than a machine has, as taking turns costs time. Only ``simulate`` reads it.
        collectives: measured collectives inside a host, by the number of devices; others take the
            time of the topology's links.
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
    issue_secs: float = 0.0
    action_secs: float = 0.0
    host_waits: bool = False
    products: Mapping[str, Reach] = field(default_factory=dict)
    attention: Mapping[str, Reach] = field(default_factory=dict)
    memory: Reach = FULL
    segment_secs: float = 0.0
    move_secs: float = 0.0
    p2p_secs: float = 0.0
    split_secs: float = 0.0
    wake_secs: float = 0.0
    num_cores: float = 0
    collectives: Mapping[int, Collective] = field(default_factory=dict)
    op_secs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        speeds = {
            **{f"flops_per_sec of {dtype}": value for dtype, value in self.flops_per_sec.items()},
            "bytes_per_sec": self.bytes_per_sec,
            "host_bytes_per_sec": self.host_bytes_per_sec,
            "host_memory_bytes_per_sec": self.host_memory_bytes_per_sec,
            "memory_bytes": self.memory_bytes,
        }
        bad = [f"{what} is {value}" for what, value in speeds.items() if not value > 0]
        bad += [
            f"collectives of {num} are {str(known)[:80]}"
            for num, known in self.collectives.items()
            if not _is_collective(num, known)
        ]
        bad += [f"{t} is {getattr(self, t)}" for t in NOT_NEGATIVE if not getattr(self, t) >= 0]
        if bad:
            raise PlanError(
                f"profile {self.name}: {'; '.join(bad)}; speeds are above 0, times and cores at "
                "least 0, and finite for collectives, which are of 2 devices or more."
            )

    def flops_secs(self, flops: float, dtype: str, kind: str, grown: float = 1.0) -> float:
        """Seconds of the operations of one product, with its batch, for this dtype of the result.

        The product reaches the share of one that is ``grown`` times as large.

        Raises:
            PlanError: the profile has no speed for this dtype.
        """
        if dtype not in self.flops_per_sec:
            raise PlanError(
                f"profile {self.name} has no flops_per_sec of {dtype}; it has "
                f"{', '.join(self.flops_per_sec)}."
            )
        if not flops:
            return 0.0
        reach = self.attention.get(dtype) if kind == FUSED else None
        reach = reach or self.products.get(dtype, FULL)
        return flops / (self.flops_per_sec[dtype] * reach.at(flops * grown))

    def bytes_secs(self, num_bytes: int, grown: float = 1.0) -> float:
        """Seconds of a pass over memory; ``grown`` is as in ``flops_secs``."""
        if not num_bytes:
            return 0.0
        return num_bytes / (self.bytes_per_sec * self.memory.at(num_bytes * grown))

    def cold_secs(self, num_bytes: int) -> float:
        """Seconds of a pass over memory that no cache holds.

        If the share falls with the bytes, its higher values are those of caches, which do not help
        such a pass.
        """
        if not num_bytes:
            return 0.0
        share = min(self.memory.at(num_bytes), self.memory.points[-1][1])
        return num_bytes / (self.bytes_per_sec * share)

    def call_secs(self, ring: int) -> float:
        """Seconds in which the host issues a measured collective of so many devices; 0: another."""
        known = self.collectives.get(ring)
        mine = None if known is None else known.issue_secs
        return self.issue_secs if mine is None else mine

    @property
    def measured(self) -> tuple[tuple[int, Collective], ...]:
        """The measured collectives, as a hashable value."""
        return tuple(sorted(self.collectives.items()))

    def scaled(self, **factors: float) -> DeviceProfile:
        """A profile that reaches other shares, to learn how much a result depends on them.

        Args:
            factors: by dtype, for all of its products and attention, and ``memory``; a share that
                would exceed 1 becomes 1.

        Raises:
            PlanError: the profile has no shares of that name, or a factor is not above 0.

        >>> from superscaler_core.cost.presets import PROFILES
        >>> profile = PROFILES["v100"].scaled(float32=0.5)
        >>> flops = 2 * 8192**3
        >>> slow, usual = (p.flops_secs(flops, "float32", "linear")
        ...                for p in (profile, PROFILES["v100"]))
        >>> slow == 2 * usual
        True
        """
        known = {*self.products, *self.attention, "memory"}
        wrong = [f"{name}={factor}" for name, factor in factors.items()
                 if name not in known or not factor > 0]  # fmt: skip
        if wrong:
            raise PlanError(
                f"profile {self.name} cannot be scaled by {', '.join(wrong)}: factors are above 0, "
                f"of {', '.join(sorted(known))}."
            )

        def times(reaches: Mapping[str, Reach]) -> Mapping[str, Reach]:
            return {key: reach.scaled(factors.get(key, 1.0)) for key, reach in reaches.items()}

        return replace(
            self, products=times(self.products), attention=times(self.attention),
            memory=self.memory.scaled(factors.get("memory", 1.0)),
        )  # fmt: skip

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions behind a result, one per line."""
        peaks = ", ".join(f"{v / 1e12:.4g} {dtype}" for dtype, v in self.flops_per_sec.items())
        shares = [_shares(f"{dtype} products", reach) for dtype, reach in self.products.items()]
        shares += [_shares(f"{dtype} attention", reach) for dtype, reach in self.attention.items()]
        shares += [_shares("memory", self.memory)]
        lines = [
            f"device {self.name}: peak TFLOP/s {peaks}; memory {bytes_text(self.memory_bytes)}",
            f"GB/s of memory {self.bytes_per_sec / 1e9:.4g}, to the host "
            f"{self.host_bytes_per_sec / 1e9:.4g}, of the host's memory "
            f"{self.host_memory_bytes_per_sec / 1e9:.4g}",
            f"shares reached, by size: {', '.join(shares)}; "
            f"launch of an op {1e6 * self.launch_secs:.3g} us",
        ]
        if self.op_secs:
            lines.append(
                f"{len(self.op_secs)} op shapes measured, others by the roofline; a segment takes "
                f"{1e6 * self.segment_secs:.3g} us, one that communicates "
                f"{1e6 * self.move_secs:.3g} us more, and {1e6 * self.p2p_secs:.3g} us "
                "if it does so between stages; the halves of an op's backward take "
                f"{1e6 * self.split_secs:.3g} us more than the whole; who waits for others goes "
                f"on up to {1e6 * self.wake_secs:.3g} us later"
            )
        if self.issue_secs or self.action_secs:
            lines.append(
                f"hosts issue a kernel or a call in {1e6 * self.issue_secs:.3g} us, and take "
                f"{1e3 * self.action_secs:.3g} ms more for every action of a stage"
                + (", before and after which they wait for their devices" * self.host_waits)
            )
        for num, known in self.collectives.items():
            lines.append(
                f"measured collectives of {num} devices in a host: {1e6 * known.latency_secs:.3g} "
                f"us, {known.bytes_per_sec / 1e9:.4g} GB/s"
            )
        if self.num_cores:
            lines.append(f"all devices take turns on {self.num_cores:.3g} cores")
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
        write_whole(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Read a profile that ``save`` wrote.

        Raises:
            PlanError: the file is not a profile.
            OSError: the file cannot be read.
        """
        try:
            values = json.loads(_read(Path(path)))
            if not isinstance(values, dict) or values.pop("version", None) != FILE_VERSION:
                raise TypeError(f"it is no JSON object of version {FILE_VERSION}")
            return cls(**_checked(values))
        except RecursionError:
            raise PlanError(f"{path} is not a device profile: it is nested too deeply.") from None
        except (ValueError, TypeError, PlanError) as error:
            raise PlanError(f"{path} is not a device profile: {str(error).rstrip('.')}.") from None


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it is longer than {MAX_FILE_BYTES} bytes")
    return data


def _shares(what: str, reach: Reach) -> str:
    """The lowest and the highest share of a table."""
    (_, least), (_, most) = reach.points[0], reach.points[-1]
    return f"{least:.2g} to {most:.2g} of {what}" if least != most else f"{most:.2g} of {what}"


def _reach(name: str, value: Any) -> Reach:
    points = value.get("points") if isinstance(value, dict) else None
    pairs = [p for p in points if isinstance(p, list) and len(p) == 2] if points else []
    if not pairs or not all(isinstance(x, int | float) for pair in pairs for x in pair):
        raise TypeError(f"{name} is no table of pairs: {str(value)[:40]!r}")
    return Reach(tuple((amount, share) for amount, share in pairs))


def _is_collective(num: object, known: object) -> bool:
    if type(num) is not int or num < 2 or not isinstance(known, Collective) or None in known[:2]:
        return False
    figures = [x for x in known if x is not None]
    are_numbers = all(type(x) in (int, float) and isfinite(x) and x >= 0 for x in figures)
    return are_numbers and known[1] > 0


def _collectives(values: Mapping[str, Any]) -> dict[int, Collective]:
    found = {}
    for num, value in values.items():
        is_list = isinstance(value, list) and len(value) == 3
        if not is_list or not (num.isascii() and num.isdecimal() and len(num) < 10):
            raise TypeError(f"collectives of {num[:20]} are {str(value)[:40]!r}")
        found[int(num)] = Collective(*value)
    return found


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for former, name in _FORMER.items():
        if former in values:
            said = f"{former!r} of a profile is {name!r} now; save it again."
            warnings.warn(said, FutureWarning, stacklevel=3)
            values = {**values, name: values[former]}
            del values[former]
    known = {each.name for each in fields(DeviceProfile)}
    if set(values) - known:
        raise TypeError(f"it has the unknown entries {', '.join(sorted(set(values) - known))}")
    for name, value in values.items():
        kind = _KINDS.get(name, (int, float))
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    for key, number in values.get("flops_per_sec", {}).items():
        if not isinstance(number, int | float):
            raise TypeError(f"flops_per_sec of {key} is {str(number)[:40]!r}")
    read: dict[str, Any] = {
        name: {key: _reach(f"{name} of {key}", reach) for key, reach in values[name].items()}
        for name in ("products", "attention")
        if name in values
    }
    if "memory" in values:
        read["memory"] = _reach("memory", values["memory"])
    if "collectives" in values:
        read["collectives"] = _collectives(values["collectives"])
    table = {}
    for key, pair in values.get("op_secs", {}).items():
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(x, int | float) and x >= 0 for x in pair):
            raise TypeError(f"op_secs of {key[:80]!r} is no pair of seconds")
        table[key] = (pair[0], pair[1])
    return {**values, **read, "op_secs": table, "notes": tuple(map(str, values.get("notes", ())))}


_FORMER = {"carry_secs": "p2p_secs"}
"""Entries of earlier versions, with their names today; they can be read for one release more."""

_KINDS: Mapping[str, Any] = {
    "name": str,
    "flops_per_sec": dict,
    "products": dict,
    "attention": dict,
    "collectives": dict,
    "memory": dict,
    "op_secs": dict,
    "host_waits": bool,
    "notes": list,
}
