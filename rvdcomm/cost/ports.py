"""Cost: what a plan takes under the port model, and the traffic that it is computed from.

A step's time is ``alpha * rounds + max over ports (bytes through the port / its bandwidth)``, with
all groups of the step running at once; ports are full duplex, so the busier direction counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rvdcomm.layout import Topology

Traffic = Mapping[tuple[int, int], int]
"""Bytes from rank to rank: ``{(src_rank, dst_rank): bytes}``; a rank to itself is not traffic."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plan takes; also a lower bound, field by field.

    Attributes:
        secs: time under the port model, in seconds.
        wire_bytes: bytes sent from a rank to another, all ranks together.
        host_bytes: those of them that leave a host.
        peak_bytes: memory of the rank that needs most: its src and dst shards and all buffers.
        rounds: messages one after another on the busiest rank, all steps together.
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
    """One step's share of a plan's cost."""

    secs: float
    wire_bytes: int
    host_bytes: int
    rounds: int
    recv_bytes: dict[int, int]


def step_cost(traffic: Traffic, topology: Topology, rounds: int | None = None) -> StepCost:
    """Price one step: ``rounds`` defaults to the partners of the rank that has most."""
    num_levels = len(topology.levels)
    port_bytes: list[dict[tuple[int, str], int]] = [{} for _ in range(num_levels)]
    partners: dict[tuple[int, str], int] = {}
    recv_bytes: dict[int, int] = {}
    wire_bytes = host_bytes = 0
    for (src, dst), num_bytes in traffic.items():
        if src == dst or num_bytes == 0:
            continue
        distance = topology.distance(src, dst)
        wire_bytes += num_bytes
        host_bytes += num_bytes if distance > 1 else 0
        recv_bytes[dst] = recv_bytes.get(dst, 0) + num_bytes
        for end in ((src, "out"), (dst, "in")):
            partners[end] = partners.get(end, 0) + 1
        for level in range(distance):
            home, ports = topology.homes[level], port_bytes[level]
            for port in ((home[src], "out"), (home[dst], "in")):
                ports[port] = ports.get(port, 0) + num_bytes
    if not wire_bytes:
        return StepCost(0.0, 0, 0, 0, {})
    rounds = max(partners.values()) if rounds is None else rounds
    secs = port_secs([max(ports.values(), default=0) for ports in port_bytes], rounds, topology)
    return StepCost(secs, wire_bytes, host_bytes, rounds, recv_bytes)


def port_secs(busiest_bytes: Sequence[int], rounds: int, topology: Topology) -> float:
    """The time of what happens at once: of its rounds, and of the busiest port of any level.

    Args:
        busiest_bytes: through the busiest port of every level.
        rounds: messages one after another, each with the latency of the farthest level in use.
    """
    links = [level.link for level, used in zip(topology.levels, busiest_bytes, strict=True) if used]
    if not links:
        return 0.0
    busy = zip(filter(None, busiest_bytes), links, strict=True)
    return links[-1].alpha_secs * rounds + max(n / link.bytes_per_sec for n, link in busy)


def total_cost(steps: Iterable[StepCost], peak_bytes: int) -> Cost:
    """Add up steps that run one after another."""
    steps = list(steps)
    recv_bytes: dict[int, int] = {}
    for step in steps:
        for rank, num_bytes in step.recv_bytes.items():
            recv_bytes[rank] = recv_bytes.get(rank, 0) + num_bytes
    return Cost(
        secs=sum(step.secs for step in steps),
        wire_bytes=sum(step.wire_bytes for step in steps),
        host_bytes=sum(step.host_bytes for step in steps),
        peak_bytes=peak_bytes,
        rounds=sum(step.rounds for step in steps),
        recv_bytes=max(recv_bytes.values(), default=0),
    )
