"""PipeDream's planner: the slowest stage as fast as possible, where stages may have replicas.

Objective: the time of the slowest stage. A stage of layers i to j on m devices takes

    T(i, j, m) = compute(i, j, m) + 4 (m - 1) w / (bandwidth m**2)

seconds per microbatch, where w is the size of its weights in bytes. Replicas handle different
minibatches and synchronize their gradients after each, so a minibatch pays 1 / m of that time. The
best time of the layers from i on, on m devices, is

    A(i, m) = min over k, m' of max(T(i, k, m'), A(k, m - m'))

Complexity: ``O(K**2 D N)`` for K layers, D devices and N numbers of replicas, times the number of
stages if memory limits it. The hierarchical form first solves every run of layers inside a host,
which takes ``O(K)`` times as long as one such smaller problem, and then replicates these pipelines
over hosts.

Differences from the published code (``optimizer_graph_hierarchical.py``): replicas share a
microbatch, so their computation is that of the problem's costs, not an m-th. The programme goes
from the last layer to the first, so the number of stages behind a stage, which decides how many
microbatches it keeps, is known exactly. Devices may stay unused. As in that code (but not in the
paper), synchronization is added to the computation, and transfers between stages are not counted,
because they run beside computation. In the hierarchical form, a stage keeps as many microbatches as
the pipeline of its own host needs.

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from superscaler_core.published.stages.candidates import UNLIMITED, Candidates
from superscaler_core.published.stages.chains import Chains
from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.degrees import Degrees
from superscaler_core.published.stages.points import prefixes
from superscaler_core.published.stages.problem import Array, StageProblem

SYNC_FACTOR = 4
"""Every weight is sent and received twice: as a gradient, and as a new value."""


def pipedream(problem: StageProblem) -> StageCut:
    """Cut a chain of layers into stages with replicas, as if all devices were equally near.

    Raises:
        PlanError: no cut fits in memory.
    """
    replicas = [each for each in problem.degrees if each.tensor == 1]
    candidates = Candidates.of(problem.with_degrees(replicas), prefixes(problem))
    sync = _sync_secs(problem, candidates, problem.bytes_per_sec(problem.num_devices))
    value, stages = Chains(
        candidates, candidates.secs + sync, problem.num_devices, by_max=True
    ).least()
    if not stages:
        raise problem.no_cut("PipeDream")
    return problem.placed([(candidates.layers(p, q), replicas[c]) for p, q, c in stages], value)


def pipedream_hierarchical(problem: StageProblem) -> StageCut:
    """Cut a chain of layers into pipelines inside hosts, each of which is replicated over hosts.

    If a host has m replicas, each of its stages gets m times as many replicas. If there are fewer
    devices than a host has, they count as one host.

    Raises:
        PlanError: no cut fits in memory.
    """
    per_host = min(problem.per_host, problem.num_devices)
    num_hosts = problem.num_devices // per_host
    hosts = [host for m in range(1, num_hosts + 1) if (host := _Host.of(problem, m, per_host))]
    secs = np.stack([host.secs for host in hosts], axis=2)
    behind = np.full(secs.shape, UNLIMITED)
    outer = Candidates(prefixes(problem), tuple(host.replicas for host in hosts), secs, behind)
    sync = _sync_secs(problem, outer, problem.outer_bytes_per_sec)
    value, chosen = Chains(outer, secs + sync, num_hosts, by_max=True).least()
    if not chosen:
        raise problem.no_cut("PipeDream's hierarchical form")
    return problem.placed([stage for p, q, c in chosen for stage in hosts[c].stages(p, q)], value)


def _sync_secs(problem: StageProblem, candidates: Candidates, bytes_per_sec: float) -> Array:
    """Seconds of synchronization per minibatch, ``[p, q, c]``."""
    replicas = np.array(candidates.sizes, dtype=float)
    moved = SYNC_FACTOR * (replicas - 1) / replicas**2 / bytes_per_sec
    return np.asarray(candidates.weight_bytes(problem)[:, :, None] * moved)


@dataclass(frozen=True, eq=False)
class _Host:
    """The best pipelines of all runs of layers inside a host that is replicated.

    Attributes:
        replicas: the number of replicas of the host.
        degrees: the degrees of stages, counted over all replicas of the host.
        pipelines: the pipelines, by the point at which a run ends, from 1.
    """

    replicas: int
    degrees: tuple[Degrees, ...]
    pipelines: tuple[Chains, ...]

    @classmethod
    def of(cls, problem: StageProblem, replicas: int, num_devices: int) -> _Host | None:
        """The pipelines for one number of replicas; None if no degrees are a multiple of it."""
        degrees = tuple(
            each
            for each in problem.degrees
            if each.tensor == 1 and each.data % replicas == 0
            and each.data <= replicas * num_devices
        )  # fmt: skip
        if not degrees:
            return None
        points = prefixes(problem)
        candidates = replace(
            Candidates.of(problem.with_degrees(degrees), points),
            sizes=tuple(each.data // replicas for each in degrees),
        )
        sync = _sync_secs(problem, candidates, problem.inner_bytes_per_sec) / replicas
        values = candidates.secs + sync
        pipelines = (
            Chains(candidates.until(end), values[: end + 1, : end + 1], num_devices, by_max=True)
            for end in range(1, len(points))
        )
        return cls(replicas, degrees, tuple(pipelines))

    @property
    def secs(self) -> Array:
        """Seconds of the slowest stage of every run's best pipeline, ``[p, q]``."""
        num = len(self.pipelines) + 1
        found = np.full((num, num), np.inf)
        for end, chains in enumerate(self.pipelines, 1):
            found[:end, end] = chains.best[1:, :end].min(axis=(0, 2))
        return found

    def stages(self, start: int, end: int) -> list[tuple[tuple[int, ...], Degrees]]:
        """The stages of a run's best pipeline, with degrees over all replicas."""
        chains = self.pipelines[end - 1]
        _, chosen = chains.least(start=start)
        return [(chains.candidates.layers(p, q), self.degrees[c]) for p, q, c in chosen]
