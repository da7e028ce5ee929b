"""Calibrate: time the probes on a process group, fit the links of its levels, compare its hosts.

All ranks run the same probes in the same order. The number of repetitions and the largest size
follow from the times of the slowest rank, which all ranks know: no rank leaves a loop early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import prod
from typing import Any

import numpy as np
import torch

from rvdcomm import CommError, LayoutError, Level, Link, Plan, Redistributor, Topology
from rvdcomm.api import drain
from rvdcomm.calibration.clock import Clock, shards_of
from rvdcomm.calibration.fit import Fit, Floats, LevelFit, Sample, fit_links, noise_of
from rvdcomm.calibration.hosts import ALL_EQUAL, HostRates, compared, next_pairs, with_rates
from rvdcomm.calibration.probes import ITEM_BYTES, Probe, probes, rounds_and_port_bytes, transfers
from rvdcomm.network import Links
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
) -> tuple[Links, Fit]:
    """Measure the links between the ranks of ``group``; collective over all of them.

        links, fit = rvdcomm.calibration.calibrate()
        links.save("links.json", notes=fit.notes())   # Network.load reads it

    Args:
        group: process group; the default group if None.
        executor: the executor whose transfers are measured, as in ``redistribute``.
        like: a topology whose groups are measured, for example with racks; if None, the ranks
            find out which of them share a host.
        effort: how long and how large; the default if None.
        progress: called with the name of each measurement before it starts.

    Returns:
        A topology, or a network if some hosts are slower or faster than most (``fit.rates``); and
        the fit with its samples. Both are equal on all ranks.

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
    measured = [transfer for probe in probes(run.topology) for transfer in run.transfers(probe)]
    names = [level.name for level in run.topology.levels]
    fit = fit_links([transfer.whole for transfer in measured], names, _about(world, executor))
    levels = zip(run.topology.levels, fit.levels, strict=True)
    topology = Topology(tuple(replace(level, link=of.link) for level, of in levels))
    depth = _host_level(groups, topology)
    rates = ALL_EQUAL if depth is None else run.host_rates(depth, fit, measured)
    return with_rates(topology, rates), replace(fit, rates=rates)


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


def _host_level(asked: Topology, topology: Topology) -> int | None:
    """The index of the level whose groups are hosts; None if there is one host."""
    hosts = [{tuple(sorted(group)) for group in level.groups} for level in asked.levels[1:2]]
    return next((i for i, of in enumerate(topology.levels) if set(of.groups) in hosts), None)


def _about(world: World, executor: str) -> list[tuple[str, str]]:
    return [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("ranks", str(world.size)),
        ("backend", world.backend),
        ("executor", executor),
        ("torch", torch.__version__),
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """A probe of one size: as a ``whole``, whose slowest rank counts, and each of its sets."""

    probe: Probe
    whole: Sample
    sets: tuple[Sample, ...]


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

    def transfers(self, probe: Probe) -> Iterator[Measured]:
        """One probe, from small tensors to large ones."""
        num_bytes, secs = self._effort.min_bytes, 0.0
        while num_bytes <= self._effort.max_bytes and secs <= self._effort.long_secs:
            yield (found := self._measured(probe, num_bytes))
            num_bytes, secs = num_bytes * SIZE_FACTOR, found.whole.secs

    def host_rates(self, depth: int, fit: Fit, measured: Sequence[Measured]) -> HostRates:
        """The rates of the hosts, which are the groups of level ``depth``, from further transfers.

        Not compared are rates that are hidden by latency even in the largest transfer.
        """
        hosts, level = self.topology.levels[depth].groups, fit.levels[depth]
        largest = max(level.samples, key=lambda sample: sample.port_bytes)
        pairs = self._pairs(depth, level) if level.shows_rate(largest) else {}
        # Sizes grow, so the largest of each kind stays.
        last = {m.probe.kind.name: m for m in measured if m.probe.level < depth}
        inside = {
            kind: {hosts.index(src): of for (src, _), of in zip(m.probe.ends, m.sets, strict=True)}
            for kind, m in last.items()
            if fit.levels[0].shows_rate(m.whole)
        }
        return compared(
            hosts,
            {pair: level.rate(sample) for pair, sample in pairs.items()},
            {
                kind: {host: fit.levels[0].rate(sample) for host, sample in of.items()}
                for kind, of in inside.items()
            },
            pair_noise=noise_of(pairs.values()),
            inside_noise=noise_of(sample for of in inside.values() for sample in of.values()),
        )

    def _pairs(self, depth: int, level: LevelFit) -> dict[tuple[int, int], Sample]:
        """A transfer from host to host of as many pairs as are needed, disjoint pairs at once."""
        sizes = (s.port_bytes for s in level.samples if s.secs <= self._effort.long_secs)
        num_bytes = max(sizes, default=self._effort.min_bytes)
        everybody = tuple(range(self._world.size))
        groups = [*(of.groups for of in self.topology.levels), (everybody,)]
        hosts, parents = groups[depth : depth + 2]
        families = [
            [host for host, ranks in enumerate(hosts) if ranks[0] in parent] for parent in parents
        ]
        found: dict[tuple[int, int], Sample] = {}
        rates: dict[tuple[int, int], float] = {}
        while pairs := [pair for family in families for pair in next_pairs(family, rates)]:
            for ends in (pairs, [(b, a) for a, b in pairs]):
                probe = transfers(depth, [(hosts[a], hosts[b]) for a, b in ends])
                found.update(zip(ends, self._measured(probe, num_bytes).sets, strict=True))
            rates = {pair: level.rate(sample) for pair, sample in found.items()}
        return found

    def _measured(self, probe: Probe, num_bytes: int) -> Measured:
        """One probe of one size."""
        kind = probe.kind.name
        self._progress(f"{self.topology.levels[probe.level].name} {kind} {num_bytes} bytes")
        plans = [probe.plan(i, num_bytes, self.topology) for i in range(len(probe.ends))]
        try:
            secs = np.array(self._repeated(self._call(probe, num_bytes)))
        except CommError as error:
            raise CommError(f"calibrate {kind} of {num_bytes} bytes: {error}") from None
        slowest = (secs[:, made.path.ranks].max(axis=1) for made in plans)
        sets = (_sample(probe, *of) for of in zip(plans, slowest, strict=True))
        return Measured(probe, _sample(probe, plans[0], secs.max(axis=1)), tuple(sets))

    def _call(self, probe: Probe, num_bytes: int) -> Callable[[], object]:
        """The call of this rank in a probe; it does nothing if the probe leaves the rank out."""
        place = probe.place_of(self._world.rank)
        if place is None:
            return lambda: None
        made = probe.plan(place, num_bytes, self.topology)
        src, dst = shards_of(made.src, made.dst, made.dtype, self._world)
        run = Redistributor(made, self._group, executor=self._executor)
        return lambda: run(src, out=dst)

    def _repeated(self, call: Callable[[], object]) -> list[list[float]]:
        """Seconds per call on each rank, several times; equal on all ranks."""
        self._clock.secs(call)
        num_calls = max(1, min(MAX_CALLS, int(LONG_SECS / self._clock.secs(call))))
        found: list[list[float]] = []
        while len(found) < MIN_REPETITIONS or (
            len(found) < MAX_REPETITIONS and sum(map(max, found)) * num_calls < self._effort.secs
        ):
            found.append(self._clock.secs_of_each(call, num_calls))
        return found


def _sample(probe: Probe, made: Plan, secs: Floats) -> Sample:
    """The sample of a plan that took ``secs`` in its repetitions."""
    rounds, port_bytes = rounds_and_port_bytes(made, probe.level)
    low, middle, high = (float(q) for q in np.quantile(secs, [0.25, 0.5, 0.75]))
    tensor_bytes, spread = ITEM_BYTES * prod(made.src.shape), (high - low) / middle
    kind = probe.kind.name
    return Sample(probe.level, kind, tensor_bytes, rounds, port_bytes, middle, spread)
