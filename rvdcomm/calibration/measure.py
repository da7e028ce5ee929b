"""Measure: time the probes on a process group, all ranks doing the same in the same order.

How often something is repeated, and where the sizes end, follows from times that all ranks have
seen: the slowest rank's. So no rank leaves a loop that another one stays in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rvdcomm.api.pending import drain
from rvdcomm.api.redistributor import Redistributor
from rvdcomm.calibration.fit import Fit, Sample, fit_links
from rvdcomm.calibration.probes import ITEM_BYTES, Probe, probes, rounds_and_port_bytes
from rvdcomm.errors import CommError, LayoutError
from rvdcomm.layout import Level, Link, Topology
from rvdcomm.plans.planner import Plan
from rvdcomm.run.agree import exchange_posts
from rvdcomm.run.choice import executor_name
from rvdcomm.run.shared_memory.rendezvous import islands
from rvdcomm.run.world import World
from rvdcomm.text import quoted

NOMINAL = Link(20e-6, 3e9), Link(60e-6, 1e9)
"""Links to plan the probes with; each has one step, so they decide nothing."""

MAX_CALLS, LONG_SECS = 50, 0.1
"""Short calls are made in a row: where cores are few, ranks leave a barrier milliseconds apart, and
what a receiver finds waiting for it seems to have come at no time."""

MIN_REPETITIONS, MAX_REPETITIONS = 3, 20
SIZE_FACTOR = 4

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        secs: time for a transfer of one size, at least three repetitions.
        min_bytes, max_bytes: sizes of tensors, from one to the other by factors of 4.
        long_secs: sizes end where a call takes as long; what a shaped link lets through in a burst
            is then long past.
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


def measured(
    group: Any,
    executor: str | None,
    like: Topology | None,
    effort: Effort | None,
    progress: Progress = lambda text: None,
) -> tuple[Topology, Fit]:
    """``calibrate``, which documents it; ``progress`` hears what is measured next."""
    world, effort, executor = World.of(group), effort or Effort(), executor_name(executor)
    drain()
    _check_agreement(world, executor, like, effort)
    everybody = tuple(range(world.size))
    if world.size < 2:
        raise LayoutError("calibrate: a world of one rank has no links; start at least 2 ranks.")
    topology = _outline(world, like if like is not None else _found(world, everybody))
    samples = [
        sample
        for probe in probes(topology)
        for sample in _samples(probe, topology, world, group, executor, effort, progress)
    ]
    fit = fit_links(samples, [level.name for level in topology.levels], _about(world, executor))
    links = [level.link for level in fit.levels]
    levels = zip(topology.levels, links, strict=True)
    return Topology(tuple(replace(level, link=link) for level, link in levels)), fit


def _check_agreement(world: World, executor: str, like: Topology | None, effort: Effort) -> None:
    """Raise on all ranks if they were asked for different things."""
    asked = {
        "executor": executor,
        "effort": asdict(effort),
        "like": None if like is None else like.to_json(),
    }
    posts = exchange_posts(world, tuple(range(world.size)), asked, "calibrate")
    for rank, post in posts.items():
        for name, value in post.items():
            if value != posts[0][name]:
                raise LayoutError(
                    f"calibrate: {name} is {quoted(value)} on rank {rank} and "
                    f"{quoted(posts[0][name])} on rank 0; all ranks must ask for the same."
                )


# --- levels -------------------------------------------------------------------------------------


def _found(world: World, ranks: tuple[int, ...]) -> Topology:
    """The hosts that the ranks are on."""
    return Topology.hosts(islands(world, ranks), *NOMINAL)


def _outline(world: World, topology: Topology) -> Topology:
    """The levels that have ports of their own: not those whose groups are those of the level below.

    Outermost, a group of all ranks has nobody to speak to.
    """
    if topology.ranks != frozenset(range(world.size)):
        raise LayoutError(
            f"calibrate: the topology has {len(topology.ranks)} ranks, the group has ranks 0 to "
            f"{world.size - 1}; they must be the same."
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


# --- times --------------------------------------------------------------------------------------


def _samples(
    probe: Probe,
    topology: Topology,
    world: World,
    group: Any,
    executor: str,
    effort: Effort,
    progress: Progress,
) -> Iterator[Sample]:
    """One probe, from small tensors to large ones."""
    num_bytes = effort.min_bytes
    place = probe.place_of(world.rank)
    while num_bytes <= effort.max_bytes:
        progress(f"{topology.levels[probe.level].name} {probe.kind.name} {num_bytes} bytes")
        first = probe.plan(0, num_bytes, topology)
        mine = None if place is None else probe.plan(place, num_bytes, topology)
        with _named(f"calibrate {probe.kind.name} of {num_bytes} bytes"):
            call = _call(mine, world, group, executor)
            secs = _repeated(call, world, group, effort.secs)
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
        if middle > effort.long_secs:
            return
        num_bytes *= SIZE_FACTOR


def _call(made: Plan | None, world: World, group: Any, executor: str) -> Callable[[], object]:
    """What this rank does; nothing if it takes no part."""
    if made is None:
        return lambda: None
    dtype, device = getattr(torch, made.dtype), world.device
    shards = [
        torch.ones(layout.cell(world.rank).box.shape, dtype=dtype, device=device)
        if world.rank in layout
        else None
        for layout in (made.src, made.dst)
    ]
    run = Redistributor(made, group, executor=executor)
    return lambda: run(shards[0], out=shards[1])


def _repeated(
    call: Callable[[], object], world: World, group: Any, wanted_secs: float
) -> list[float]:
    """Seconds of a call, several times; equal on all ranks."""
    _timed(call, 1, world, group)
    num_calls = max(1, min(MAX_CALLS, int(LONG_SECS / _timed(call, 1, world, group))))
    secs: list[float] = []
    while len(secs) < MIN_REPETITIONS or (
        len(secs) < MAX_REPETITIONS and sum(secs) * num_calls < wanted_secs
    ):
        secs.append(_timed(call, num_calls, world, group))
    return secs


def _timed(call: Callable[[], object], num_calls: int, world: World, group: Any) -> float:
    """Seconds a call on the slowest rank."""
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    secs = (time.perf_counter() - start) / num_calls
    slowest = torch.tensor([secs], dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest.item())


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say which transfer failed."""
    try:
        yield
    except CommError as error:
        raise CommError(f"{what}: {error}") from None
    except RuntimeError as error:  # torch.distributed's own
        raise CommError(f"{what}: a rank failed or is late: {error}") from None
