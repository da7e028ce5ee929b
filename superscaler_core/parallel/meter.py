"""Meter: counts and times the calls of a parallel model on one rank."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod
from typing import Any

import torch

import rvdcomm as rv
from superscaler_core.compiled import Compiled
from superscaler_core.cost import DeviceProfile
from superscaler_core.cost.model_flops import model_flops
from superscaler_core.errors import PlanError
from superscaler_core.parallel.stats import Stats, StepStats, summed
from superscaler_core.report.move import moves_of
from superscaler_core.run.rank import Rank
from superscaler_core.run.transport import Transport

KINDS = ("step", "evaluate")
"""The kinds of calls that are counted."""


class Facts:
    """What one call of a program does on a rank, whatever time it takes.

    Each fact is found when it is first asked for: a loop that asks for nothing pays nothing.

    Args:
        compiled: the program.
        rank: this rank of it.
    """

    def __init__(self, compiled: Compiled, rank: Rank) -> None:
        self._compiled, self._tables = compiled, rank.tables
        # The rank itself has tensors, which may be dropped before the facts.
        self._device = rank.device

    def stats(self, kind: str, peak: Any) -> StepStats:
        """The stats of one call, without its times and what a transport counts."""
        samples, tokens = self._amounts
        is_measured = self._device.type == "cuda"
        return StepStats(
            kind,
            num_calls=1,
            samples=samples,
            tokens=tokens,
            sent_bytes=self.planned_bytes,
            sent_is_counted=False,
            peak_bytes=self._measured_bytes() if is_measured else self._account_bytes,
            peak_is_measured=is_measured,
            model_flops=self._flops[kind == "step"],
            num_devices=self._tables.num_ranks,
            peak_flops_per_sec=_peak(peak, self._dtype),
        )

    @cached_property
    def _amounts(self) -> tuple[int, int]:
        """Samples and tokens of the whole batch."""
        samples = tokens = 0
        num = self._tables.num_microbatches
        for name, (shape, dtype) in self._tables.inputs.items():
            dim = self._tables.samples_dim(name)
            if dim is None:
                continue
            samples = samples or shape[dim] * num
            is_text = len(shape) > 1 and not getattr(torch, dtype).is_floating_point
            tokens = tokens or (prod(shape) * num if is_text else 0)
        return samples, tokens

    @cached_property
    def _of_graph(self) -> Any:
        return model_flops(self._compiled.plan.graph)

    @property
    def _dtype(self) -> str:
        """The dtype in which most is computed."""
        found: str = self._of_graph.dtype
        return found

    @cached_property
    def _flops(self) -> tuple[float, float]:
        """Floating-point operations of an evaluation and of a step, of all microbatches."""
        found, num = self._of_graph, self._tables.num_microbatches
        return num * found.forward, num * (found.forward + found.backward)

    @cached_property
    def planned_bytes(self) -> int:
        """Bytes that this rank sends in a call, as the plans of its communication say."""
        made, sent_in = self._compiled.materialized, dict[int, int]()
        total = 0
        for move in moves_of(made, made.topology, self._compiled.precision):
            for plan in move.plans:
                # Layers that are alike share plans, which are kept as long as the program.
                if id(plan) not in sent_in:
                    sent_in[id(plan)] = _sent_bytes(plan, self._tables.rank)
                total += move.num_times * sent_in[id(plan)]
        return total

    @cached_property
    def _account_bytes(self) -> int:
        return self._compiled.memory[self._tables.rank].step_bytes

    def _measured_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def _sent_bytes(plan: rv.Plan, rank: int) -> int:
    """The bytes that one rank sends to others in a plan."""
    return plan.program.item_bytes * sum(
        num_elements
        for collective in plan.program.collectives
        for (src, dst), num_elements in collective.traffic().items()
        if src == rank and src != dst
    )


def _peak(peak: float | DeviceProfile | None, dtype: str) -> float | None:
    """The operations per second of a device in a dtype.

    Raises:
        PlanError: a profile has none for the dtype.
    """
    if not isinstance(peak, DeviceProfile):
        return peak
    if dtype not in peak.flops_per_sec:
        raise PlanError(
            f"profile {peak.name} has no flops_per_sec of {dtype}, in which most of the model is "
            f"computed; it has {', '.join(peak.flops_per_sec)}: give stats a number."
        )
    return peak.flops_per_sec[dtype]


@dataclass
class _Sum:
    """What was measured of equal calls."""

    num: int = 0
    secs: float = 0.0
    wall_secs: float = 0.0
    sent_bytes: int = 0

    def add(self, other: _Sum) -> None:
        self.num += other.num
        self.secs += other.secs
        self.wall_secs += other.wall_secs
        self.sent_bytes += other.sent_bytes


class Meter:
    """Counts and times the calls of a model on one rank; never waits for a device or a rank.

    Args:
        transport: moves the tensors; it may count the bytes that this rank sends.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._has_counter = hasattr(transport, "sent_bytes")
        self.peak: float | DeviceProfile | None = None
        """The peak of a device in operations per second, or its profile; None if not known."""
        self._numbers = dict.fromkeys(KINDS, 0)
        self._steps: dict[Facts, _Sum] = {}
        self._settled: list[StepStats] = []
        self._last: dict[str, tuple[Facts, _Sum]] = {}
        self._ended: float | None = None

    @contextmanager
    def timed(self) -> Iterator[_Sum]:
        """A call; ``note`` takes what was measured once it has succeeded."""
        begun, sent = time.perf_counter(), self._sent_bytes
        found = _Sum(1)
        yield found
        now = time.perf_counter()
        found.secs = now - begun
        found.wall_secs = now - (begun if self._ended is None else self._ended)
        found.sent_bytes = self._sent_bytes - sent
        self._ended = now

    @property
    def _sent_bytes(self) -> int:
        found: int = getattr(self._transport, "sent_bytes", 0)
        return found

    def note(self, kind: str, facts: Facts, measured: _Sum) -> None:
        """A call has succeeded."""
        self._numbers[kind] += 1
        self._last[kind] = facts, measured
        if kind == "step":
            self._steps.setdefault(facts, _Sum()).add(measured)

    def last(self, kind: str) -> StepStats:
        """The stats of the last call of a kind; of none if there was none."""
        return self._stats(kind, *self._last[kind]) if kind in self._last else StepStats(kind)

    def settle(self, kept: Collection[Facts]) -> None:
        """Let go of programs that are not kept; what their steps were stays in the sums."""
        steps = self._steps
        gone = [facts for facts in steps if facts not in kept]
        settled = [*self._settled, *(self._stats("step", f, steps.pop(f)) for f in gone)]
        self._settled = [summed(settled, "step")] if settled else []

    def take(self, *, reset: bool) -> Stats:
        """The stats of steps; ``reset`` begins new sums."""
        steps = [self._stats("step", facts, each) for facts, each in self._steps.items()]
        found = Stats(self.last("step"), summed([*self._settled, *steps], "step"))
        if reset:
            self._steps.clear()
            self._settled = []
        return found

    def _stats(self, kind: str, facts: Facts, measured: _Sum) -> StepStats:
        found = replace(
            facts.stats(kind, self.peak).times(measured.num),
            number=self._numbers[kind],
            secs=measured.secs,
            wall_secs=measured.wall_secs,
        )
        if not self._has_counter:
            return found
        return replace(found, sent_bytes=measured.sent_bytes, sent_is_counted=True)


def checked_peak(value: Any) -> float | DeviceProfile:
    """A peak that a caller gave.

    Raises:
        PlanError: it is neither a profile nor a number above 0.
    """
    if isinstance(value, DeviceProfile):
        return value
    if isinstance(value, int | float) and isfinite(value) and value > 0:
        return float(value)
    raise PlanError(
        "peak_flops_per_sec takes the operations per second of a device, above 0, or its "
        f"DeviceProfile, not {value!r}."
    )
