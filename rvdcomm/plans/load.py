"""Load: the bytes that the exchanges of tensors put through ports, and through a network's wires.

Tensors that are moved at the same time share ports. Their loads add up, and their time is the time
of the busiest port (docs/many.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rvdcomm.cost import StepCost, port_secs
from rvdcomm.layout import Ints
from rvdcomm.network import Links, Network
from rvdcomm.planning.path import Step
from rvdcomm.plans.fill import BundleBatch
from rvdcomm.plans.member import TensorPlan
from rvdcomm.plans.modelled import step_exchanges_of
from rvdcomm.synthesis import Pair

OUT, IN = 0, 1
"""The directions of a port."""

MAX_RANKS_OF_COUNTED_LOADS = 512
"""Limit on a step's src and dst ranks: above it, counting takes over some tenths of a second."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The bytes that one exchange puts through ports.

    Attributes:
        ports: numbers of the ports (``Ports``), each once.
        num_bytes: bytes through each of these ports.
        ranks: numbers of the ranks that send or receive.
        rounds: sequential messages of the busiest of these ranks.
        latency_secs: of a round on a network; in a topology, the ports say it.
        call: loads with equal calls are joined in one collective; a load with None is not joined.
    """

    ports: Ints
    num_bytes: Ints
    ranks: Ints
    rounds: int
    latency_secs: float = 0.0
    call: object = None

    def slice(self, index: int, count: int) -> Load:
        """The load of one slice of ``count``; the loads of all slices add up to the whole."""
        if count == 1:
            return self
        low, high = (self.num_bytes * i // count for i in (index, index + 1))
        return replace(self, num_bytes=high - low)


class Ports:
    """The ports of a topology, numbered: level by level, group by group, first out, then in.

    A network has the ports of its nearest levels, to count bytes, and then its wires, for times.
    """

    def __init__(self, links: Links) -> None:
        self.network = links if isinstance(links, Network) else None
        self.topology = links.nearest_levels if isinstance(links, Network) else links
        sizes = [2 * len(level.groups) for level in self.topology.levels]
        wires = self.network.wires if self.network else ()
        self.starts = np.cumsum([0, *sizes, *([len(wires)] if wires else [])])
        self.rates = np.array([wire.link.bytes_per_sec for wire in wires])
        self.ranks = [rank for (rank,) in self.topology.levels[0].groups]

    # --- loads ----------------------------------------------------------------------------------

    def loads(self, tensor_plan: TensorPlan) -> list[Load]:
        """The load of every exchange of a tensor: counted, or by formula if it has many ranks.

        Law (tests/plans/test_load.py): where shards are equal, the formula gives the counted bytes
        into every port, and out of all ports of a level together.
        """
        return [*tensor_plan.loads(self)]

    def of_step(self, step: Step, item_bytes: int) -> Iterator[Load]:
        """The load of every exchange of a step."""
        num_ranks = len(step.src.ranks) + len(step.dst.ranks)
        is_large = num_ranks > MAX_RANKS_OF_COUNTED_LOADS and self.network is None
        step_exchanges = step_exchanges_of(step, item_bytes, self.topology) if is_large else None
        if step_exchanges is None:
            for moves in step.moves(self.topology):
                pairs = Counter[Pair]()
                for move in moves:
                    if move.src_rank != move.dst_rank:
                        pairs[move.src_rank, move.dst_rank] += move.box.num_elements
                yield self.of_pairs(pairs, item_bytes)
            return
        for step_exchange in step_exchanges:
            through = np.zeros(self.starts[-1], np.int64)
            for level in range(len(self.topology.levels)):
                np.add.at(
                    through,
                    self._of(level, step_exchange.senders, OUT),
                    step_exchange.leaving[level],
                )
                np.add.at(
                    through, self._of(level, step_exchange.ranks, IN), step_exchange.entering[level]
                )
            yield self._load(through, step_exchange.rounds)

    def of_pairs(self, sent: Mapping[Pair, int], item_bytes: int) -> Load:
        """The load of messages that are sent at once, given in elements from rank to rank."""
        ends = [a for a, _ in sent], [b for _, b in sent]
        num_bytes = np.array([*sent.values()], np.int64) * item_bytes
        through = np.zeros(self.starts[-1], np.int64)
        for level in range(len(self.topology.levels)):
            src, dst = (self._of(level, ranks, OUT) for ranks in ends)
            leaves = src != dst
            np.add.at(through, src[leaves], num_bytes[leaves])
            np.add.at(through, dst[leaves] + IN, num_bytes[leaves])
        rounds = max((max(Counter(side).values()) for side in ends if side), default=0)
        latency_secs = 0.0
        if self.network is not None:
            for pair, count in zip(sent, num_bytes, strict=True):
                route = self.network.routes.of(*pair)
                through[[int(self.starts[-2]) + wire for wire in route.wires]] += count
                latency_secs = max(latency_secs, route.alpha_secs)
        return self._load(through, rounds, latency_secs)

    def _of(self, level: int, ranks: Sequence[int], direction: int) -> Ints:
        """The port of ``level`` that each of ``ranks`` uses."""
        home, start = self.topology.homes[level], int(self.starts[level])
        return np.array([start + 2 * home[rank] + direction for rank in ranks], np.int64)

    def _load(self, through: Ints, rounds: int, latency_secs: float = 0.0) -> Load:
        ports = np.flatnonzero(through)
        ranks = np.unique(ports[ports < self.starts[1]] // 2)
        return Load(ports, through[ports], ranks, rounds, latency_secs)

    # --- time -----------------------------------------------------------------------------------

    def busiest_bytes(self, loads: Iterable[tuple[Load, int]]) -> tuple[int, ...]:
        """Bytes through the busiest port of every level, for pairs (load, how often it occurs)."""
        levels = self._by_level(self._sum(loads))[: len(self.topology.levels)]
        return tuple(int(level.max()) for level in levels)

    def busy_secs(self, loads: Iterable[tuple[Load, int]]) -> float:
        """How long the busiest port, or the busiest wire of a network, takes for these bytes."""
        return self._secs(self._by_level(self._sum(loads)), 0, ())

    def _sum(self, loads: Iterable[tuple[Load, int]]) -> Ints:
        through = np.zeros(self.starts[-1], np.int64)
        for load, count in loads:
            through[load.ports] += load.num_bytes * count
        return through

    def _secs(self, levels: Sequence[Ints], rounds: int, loads: Iterable[Load]) -> float:
        if self.network is None:
            return port_secs([int(level.max()) for level in levels], rounds, self.topology)
        latency_secs = max((load.latency_secs for load in loads), default=0.0)
        return float((levels[-1] / self.rates).max()) + rounds * latency_secs

    def cost(self, loads: Sequence[Load]) -> StepCost:
        """The cost of loads that run at the same time."""
        ports = np.concatenate([load.ports for load in loads])
        # Whole numbers below 2**53: their sums as floats are exact.
        weights = np.concatenate([load.num_bytes for load in loads])
        through = np.bincount(ports, weights, self.starts[-1]).astype(np.int64)
        levels, rounds = self._by_level(through), self._rounds(loads)
        into = [level[IN::2] for level in levels[: len(self.topology.levels)]]
        return StepCost(
            self._secs(levels, rounds, loads),
            wire_bytes=int(into[0].sum()),
            host_bytes=int(into[1].sum()) if len(into) > 1 else 0,
            rounds=rounds,
            recv_bytes={self.ranks[i]: int(into[0][i]) for i in np.flatnonzero(into[0])},
        )

    def _by_level(self, through: Ints) -> list[Ints]:
        return np.split(through, self.starts[1:-1])

    def _rounds(self, loads: Iterable[Load]) -> int:
        """Rounds of the busiest rank; a joined collective has the rounds of its largest load."""
        of_rank = np.zeros(len(self.ranks), np.int64)
        joined: dict[object, Ints] = {}
        for load in loads:
            if load.call is None:
                of_rank[load.ranks] += load.rounds
            else:
                mine = joined.setdefault(load.call, np.zeros_like(of_rank))
                mine[load.ranks] = np.maximum(mine[load.ranks], load.rounds)
        return int(sum(joined.values(), of_rank).max())


def beat_costs(
    tensor_plans: Sequence[TensorPlan],
    batch: BundleBatch,
    loads: Mapping[TensorPlan, Sequence[Load]],
    ports: Ports,
) -> Iterator[StepCost]:
    """The cost of every beat of the batch's program; ``tensor_plans`` are the ways of its tensors.

    A bucket starts one beat after the bucket before it, and does one exchange per beat. All
    exchanges of a beat run at once, as in the program (``interleaved`` in program/slices.py).
    """
    beats: dict[int, list[Load]] = {}
    num_lanes = [
        tensor_plan.num_lanes(n)
        for tensor_plan, n in zip(tensor_plans, batch.num_slices, strict=True)
    ]
    for first, bucket in enumerate(batch.buckets):
        for tensor, lane in bucket:
            for beat, load in enumerate(loads[tensor_plans[tensor]], first):
                beats.setdefault(beat, []).append(load.slice(lane, num_lanes[tensor]))
    for beat in sorted(beats):
        yield ports.cost(beats[beat])
