"""Ports: the modelled time of a step, and the cost of a plan as a sum over its steps.

All groups of a step run at once. Ports are full duplex, so the busier direction counts. On a
network that has no levels, wires take the place of ports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rvdcomm.network import Links, Topology

Traffic = Mapping[tuple[int, int], int]
"""Bytes from rank to rank: ``{(src_rank, dst_rank): bytes}``; a rank to itself is not traffic."""

Time = TypeVar("Time", int, float)


@dataclass(frozen=True)
class PortTimes(ABC, Generic[Time]):
    """The ports of a topology and the formulas of the port model, in seconds or in whole ticks.

    ``a_round[level]`` is the latency of a round of messages whose farthest level is ``level``; it
    does not fall from level to level.
    ``port_bytes[level]`` are the bytes through the busiest port of a level, in one direction.

    Source: docs/bound.md, "The model".
    """

    a_round: Sequence[Time]

    @abstractmethod
    def busy(self, port_bytes: Sequence[int]) -> list[Time]:
        """How long the busiest port of every level takes for its bytes."""

    def step(self, port_bytes: Sequence[int], rounds: int) -> Time:
        """The time of a step: the time of its slowest port plus the latency of all its rounds."""
        farthest = farthest_level(port_bytes)
        if farthest is None:
            return 0
        return max(self.busy(port_bytes)) + rounds * self.a_round[farthest]

    def least(self, port_bytes: Sequence[int], latency: Time) -> Time:
        """A lower bound on the time of steps that together move at least these bytes.

        ``latency`` is a lower bound on the latency of all their rounds. If a level must be crossed,
        some round crosses that level or one outside it, which has no lower latency.
        """
        farthest = farthest_level(port_bytes)
        if farthest is None:
            return latency
        return max(self.busy(port_bytes)) + max(latency, self.a_round[farthest])


def farthest_level(port_bytes: Sequence[int]) -> int | None:
    """The outermost level whose ports bytes pass; None if nothing moves."""
    for level in reversed(range(len(port_bytes))):
        if port_bytes[level]:
            return level
    return None


@dataclass(frozen=True)
class PortSecs(PortTimes[float]):
    """The port model in seconds."""

    bytes_per_sec: Sequence[float]

    @classmethod
    def of(cls, topology: Topology) -> PortSecs:
        """The ports of a topology."""
        return cls(topology.latencies, [level.link.bytes_per_sec for level in topology.levels])

    def busy(self, port_bytes: Sequence[int]) -> list[float]:
        """How long the busiest port of every level takes for its bytes."""
        return [n / rate for n, rate in zip(port_bytes, self.bytes_per_sec, strict=True)]


def port_secs(port_bytes: Sequence[int], rounds: int, topology: Topology) -> float:
    """The seconds of a step that puts these bytes through the busiest port of every level."""
    return PortSecs.of(topology).step(port_bytes, rounds)


def busiest_bytes(traffic: Traffic, topology: Topology) -> list[int]:
    """Bytes through the busiest port of every level, in the direction that has more."""
    busiest = []
    for home in topology.homes:
        into: dict[int, int] = {}
        out_of: dict[int, int] = {}
        for (src, dst), num_bytes in traffic.items():
            a, b = home[src], home[dst]
            if a != b:
                out_of[a] = out_of.get(a, 0) + num_bytes
                into[b] = into.get(b, 0) + num_bytes
        busiest.append(max([0, *into.values(), *out_of.values()]))
    return busiest


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a plan, or a lower bound on every field of that cost.

    Attributes:
        secs: time under the port model, in seconds.
        wire_bytes: bytes that are sent from one rank to another, summed over all ranks.
        host_bytes: the part of ``wire_bytes`` that leaves a host.
        peak_bytes: memory of the rank that needs most: its src and dst shards and all buffers.
        rounds: sequential messages of the busiest rank of a step, summed over all steps.
        recv_bytes: bytes that the busiest rank receives from other ranks.
    """

    secs: float
    wire_bytes: int
    host_bytes: int
    peak_bytes: int
    rounds: int
    recv_bytes: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step of a plan.

    Attributes:
        secs: the time of the step if it runs alone.
        wire_bytes, host_bytes, rounds: as of ``Cost``.
        recv_bytes: bytes that each rank receives from others.
        busy_secs: the part of ``secs`` that the busiest port of each level is busy, or each wire of
            a network; empty if nothing moves, or if that is not known.
    """

    secs: float
    wire_bytes: int
    host_bytes: int
    rounds: int
    recv_bytes: dict[int, int]
    busy_secs: tuple[float, ...] = ()

    @property
    def latency_secs(self) -> float:
        """The part of ``secs`` that is the latency of rounds; all if ``busy_secs`` is empty."""
        return self.secs - max(self.busy_secs, default=0.0)


def step_cost(traffic: Traffic, links: Links, rounds: int | None = None) -> StepCost:
    """The cost of one step; ``rounds`` defaults to the number of partners of the busiest rank."""
    sent = {pair: n for pair, n in traffic.items() if n and pair[0] != pair[1]}
    if not sent:
        return StepCost(0.0, 0, 0, 0, {})
    topology = links if isinstance(links, Topology) else links.nearest_levels
    host_bytes = sum(
        n for host in topology.homes[1:2] for (a, b), n in sent.items() if host[a] != host[b]
    )
    recv_bytes: dict[int, int] = {}
    for (_, dst), num_bytes in sent.items():
        recv_bytes[dst] = recv_bytes.get(dst, 0) + num_bytes
    if rounds is None:
        rounds = num_partners(sent)
    busy, latency = busy_secs(sent, links)
    return StepCost(
        max(busy) + rounds * latency,
        sum(sent.values()),
        host_bytes,
        rounds,
        recv_bytes,
        tuple(busy),
    )


def num_partners(pairs: Collection[tuple[int, int]]) -> int:
    """Partners of the rank that sends to most, or receives from most; 0 if nothing moves."""
    return max((max(Counter(ends).values()) for ends in zip(*pairs, strict=True)), default=0)


def busy_secs(traffic: Traffic, links: Links) -> tuple[list[float], float]:
    """How long links are busy with some traffic, and the latency of one of its rounds, in seconds.

    For a topology: the busiest port of every level; for a network without levels: every wire.

    Law (tests/cost/test_cost.py): the largest of both is the same on a topology and its network.
    """
    if isinstance(links, Topology):
        ports, port_bytes = PortSecs.of(links), busiest_bytes(traffic, links)
        farthest = farthest_level(port_bytes)
        return ports.busy(port_bytes), 0.0 if farthest is None else ports.a_round[farthest]
    through: dict[int, int] = {}
    latency = 0.0
    for (src, dst), num_bytes in traffic.items():
        route = links.routes.of(src, dst)
        latency = max(latency, route.alpha_secs)
        for wire in route.wires:
            through[wire] = through.get(wire, 0) + num_bytes
    rates = [wire.link.bytes_per_sec for wire in links.wires]
    return [through.get(i, 0) / rate for i, rate in enumerate(rates)], latency


def joined_cost(steps: Iterable[StepCost]) -> StepCost:
    """Steps that run one after another, as one step."""
    steps = list(steps)
    recv_bytes: Counter[int] = Counter()
    for step in steps:
        recv_bytes.update(step.recv_bytes)
    return StepCost(
        secs=sum(step.secs for step in steps),
        wire_bytes=sum(step.wire_bytes for step in steps),
        host_bytes=sum(step.host_bytes for step in steps),
        rounds=sum(step.rounds for step in steps),
        recv_bytes=dict(recv_bytes),
    )


def pipelined_secs(busy_secs: Sequence[Sequence[float]], num_slices: int) -> float:
    """How long steps take whose ``num_slices`` slices follow each other, latencies aside.

    ``busy_secs`` are by step and level, or by step and wire. With one slice the busiest levels of
    all steps add up. With more, all levels work at the same time, except while the first slice
    enters and the last one leaves: this costs 1 / ``num_slices`` of the time that does not overlap.

    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 1)
    10.0
    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 4)
    7.0
    """
    in_turn = sum(max(of_step) for of_step in busy_secs)
    at_once = max((sum(of_level) for of_level in zip(*busy_secs, strict=True)), default=0.0)
    return at_once + (in_turn - at_once) / num_slices


def total_cost(steps: Iterable[StepCost], peak_bytes: int, num_slices: int = 1) -> Cost:
    """The cost of a plan whose steps run one after another, each slice for itself.

    The slices of a step follow each other, so latencies are paid once.
    """
    steps = list(steps)
    joined = joined_cost(steps)
    secs = joined.secs
    if num_slices > 1:
        busy = [step.busy_secs for step in steps if step.busy_secs]
        secs -= pipelined_secs(busy, 1) - pipelined_secs(busy, num_slices)
    return Cost(
        secs=secs,
        wire_bytes=joined.wire_bytes,
        host_bytes=joined.host_bytes,
        peak_bytes=peak_bytes,
        rounds=joined.rounds,
        recv_bytes=max(joined.recv_bytes.values(), default=0),
    )
