"""Calibrate: time the probes on a process group, and fit the links of its levels.

All ranks run the same probes in the same order. The number of repetitions and the largest size
follow from the times of the slowest rank, which all ranks know: no rank leaves a loop early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import prod
from typing import Any

import numpy as np
import torch

from rvdcomm import CommError, LayoutError, Level, Link, Redistributor, Topology
from rvdcomm.api import drain
from rvdcomm.calibration.clock import Clock, shards_of
from rvdcomm.calibration.fit import Fit, Sample, fit_links
from rvdcomm.calibration.probes import ITEM_BYTES, Probe, probes, rounds_and_port_bytes
from rvdcomm.run import World, compare_requests, domains, executor_name

NOMINAL = Link(20e-6, 3e9), Link(60e-6, 1e9)
"""Links for planning the probes; a probe has one step, so they decide nothing."""

MAX_CALLS, LONG_SECS = 50, 0.1
"""Short calls are timed in a row of at most ``MAX_CALLS``, about ``LONG_SECS`` in all. With few
cores, ranks leave a barrier milliseconds apart, and a message that arrives before its receiver
asks for it seems to take no time."""

MIN_REPETITIONS, MAX_REPETITIONS = 3, 20
SIZE_FACTOR = 4

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """The time and the sizes of a calibration.

    Attributes:
        secs: seconds for the transfers of one size, which are at least three repetitions.
        min_bytes, max_bytes: smallest and largest tensor; sizes grow by factors of 4.
        long_secs: seconds; no larger size is measured after a call that takes longer. A burst that
            a shaped link lets through takes much less time.
    """

    secs: float = 0.3
    min_bytes: int = 4 << 10
    max_bytes: int = 64 << 20
    long_secs: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.secs < 3600 and 0 < self.long_secs < 3600):
            raise LayoutError(f"{self}: times must be above 0 and below an hour.")
        if not 4 * SIZE_FACTOR <= SIZE_FACTOR * self.min_bytes <= self.max_bytes:
            raise LayoutError(f"{self}: max_bytes must be at least {SIZE_FACTOR} x min_bytes.")


def calibrate(
    group: Any = None,
    *,
    executor: str | None = None,
    like: Topology | None = None,
    effort: Effort | None = None,
    progress: Progress = lambda text: None,
) -> tuple[Topology, Fit]:
    """Measure the links between the ranks of ``group``; collective over all of them.

        topology, fit = rvdcomm.calibration.calibrate()
        topology.save("topology.json", notes=fit.notes())   # Topology.load reads it

    Args:
        group: process group; the default group if None.
        executor: the executor whose transfers are measured, as in ``redistribute``.
        like: a topology whose groups are measured, for example with racks; if None, the ranks
            find out which of them share a host.
        effort: how long and how large; the default if None.
        progress: called with the name of each measurement before it starts.

    Returns:
        The topology, equal on all ranks, and the fit with its samples.

    Raises:
        LayoutError: ranks were asked for different things, or there is nothing to measure.
        CommError: a rank failed or did not join within the group's timeout.
    """
    world, effort, executor = World.of(group), effort or Effort(), executor_name(executor)
    if world.size < 2:
        raise LayoutError("calibrate: a world of one rank has no links; start at least 2 ranks.")
    drain()
    everybody = tuple(range(world.size))
    plain = None if like is None else like.to_json()
    asked = {"executor": executor, "effort": asdict(effort), "topology": plain}
    compare_requests(world, everybody, asked, "calibrate")
    groups = like or Topology.hosts(domains(world, everybody), *NOMINAL)
    run = _Calibration(_outline(groups, world.size), world, group, executor, effort, progress)
    samples = [sample for probe in probes(run.topology) for sample in run.samples(probe)]
    fit = fit_links(samples, [level.name for level in run.topology.levels], _about(world, executor))
    levels = zip(run.topology.levels, fit.levels, strict=True)
    return Topology(tuple(replace(level, link=of.link) for level, of in levels)), fit


def _outline(topology: Topology, num_ranks: int) -> Topology:
    """The levels that have ports of their own.

    Left out are levels with the same groups as the level below, and a group of all ranks, which
    has no other group to send to.
    """
    if topology.ranks != frozenset(range(num_ranks)):
        raise LayoutError(
            f"calibrate: the topology has {len(topology.ranks)} ranks, the group has ranks 0 to "
            f"{num_ranks - 1}; they must be the same."
        )
    kept: list[Level] = []
    for level in topology.levels:
        groups = tuple(sorted(tuple(sorted(group)) for group in level.groups))
        if len(groups) > 1 and (not kept or groups != kept[-1].groups):
            kept.append(replace(level, groups=groups))
    return Topology(tuple(kept))


def _about(world: World, executor: str) -> list[tuple[str, str]]:
    return [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("ranks", str(world.size)),
        ("backend", world.backend),
        ("executor", executor),
        ("torch", torch.__version__),
    ]


class _Calibration:
    """One calibration on this rank."""

    def __init__(
        self,
        topology: Topology,
        world: World,
        group: Any,
        executor: str,
        effort: Effort,
        progress: Progress,
    ) -> None:
        self.topology, self._world, self._group = topology, world, group
        self._executor, self._effort, self._progress = executor, effort, progress
        self._clock = Clock(tuple(range(world.size)), group)

    def samples(self, probe: Probe) -> Iterator[Sample]:
        """One probe, from small tensors to large ones."""
        num_bytes, middle = self._effort.min_bytes, 0.0
        while num_bytes <= self._effort.max_bytes and middle <= self._effort.long_secs:
            level = self.topology.levels[probe.level].name
            self._progress(f"{level} {probe.kind.name} {num_bytes} bytes")
            first = probe.plan(0, num_bytes, self.topology)
            try:
                secs = self._repeated(self._call(probe, num_bytes))
            except CommError as error:
                what = f"calibrate {probe.kind.name} of {num_bytes} bytes"
                raise CommError(f"{what}: {error}") from None
            rounds, port_bytes = rounds_and_port_bytes(first, probe.level)
            low, middle, high = (float(q) for q in np.quantile(secs, [0.25, 0.5, 0.75]))
            yield Sample(
                probe.level,
                probe.kind.name,
                ITEM_BYTES * prod(first.src.shape),
                rounds,
                port_bytes,
                middle,
                (high - low) / middle,
            )
            num_bytes *= SIZE_FACTOR

    def _call(self, probe: Probe, num_bytes: int) -> Callable[[], object]:
        """The call of this rank in a probe; it does nothing if the probe leaves the rank out."""
        place = probe.place_of(self._world.rank)
        if place is None:
            return lambda: None
        made = probe.plan(place, num_bytes, self.topology)
        src, dst = shards_of(made.src, made.dst, made.dtype, self._world)
        run = Redistributor(made, self._group, executor=self._executor)
        return lambda: run(src, out=dst)

    def _repeated(self, call: Callable[[], object]) -> list[float]:
        """Seconds per call, several times; equal on all ranks."""
        self._clock.secs(call)
        num_calls = max(1, min(MAX_CALLS, int(LONG_SECS / self._clock.secs(call))))
        secs: list[float] = []
        while len(secs) < MIN_REPETITIONS or (
            len(secs) < MAX_REPETITIONS and sum(secs) * num_calls < self._effort.secs
        ):
            secs.append(self._clock.secs(call, num_calls))
        return secs
