"""Load: the bytes that the exchanges of tensors put through the ports of a topology.

Tensors that travel at once share ports. So the load of all of them is the sum of the load of each,
and their time is that of the busiest port, whichever tensors keep it busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rvdcomm.cost import StepCost, port_secs
from rvdcomm.layout import Topology
from rvdcomm.planning.path import Path, Step
from rvdcomm.plans.fill import Batch
from rvdcomm.plans.member import Way
from rvdcomm.plans.modelled import legs_of

Counts = NDArray[np.int64]

OUT, IN = 0, 1

MAX_COUNTED_RANKS = 512
"""Ranks of both sides; in larger worlds counting takes more than some tenths of a second a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What one exchange puts through ports.

    Attributes:
        ports: their numbers, each once.
        num_bytes: through each of them.
        ranks: numbers of the ranks that send or receive.
        rounds: messages one after another on the busiest of them.
        call: small tensors with equal ones are joined in one collective.
    """

    ports: Counts
    num_bytes: Counts
    ranks: Counts
    rounds: int
    call: object

    def part(self, index: int, count: int) -> Counts:
        """Bytes of one slice of ``count``; those of all slices add up to ``num_bytes``."""
        if count == 1:
            return self.num_bytes
        return self.num_bytes * (index + 1) // count - self.num_bytes * index // count


class Ports:
    """The ports of a topology in one row: of every level, of every group, its way out and in."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        sizes = [2 * len(level.groups) for level in topology.levels]
        self.starts = np.cumsum([0, *sizes])
        self.ranks = [rank for (rank,) in topology.levels[0].groups]

    def loads(self, path: Path, item_bytes: int) -> list[Load]:
        """The load of every exchange of ``path``: counted, or in large worlds by formula.

        Laws (tests/plans/test_load.py): by formula, as much enters every port of equal shards, and
        as much leaves all ports of a level together.
        """
        return [load for step in path.steps for load in self._of_step(step, item_bytes)]

    def _of_step(self, step: Step, item_bytes: int) -> Iterator[Load]:
        call = step.kind, step.groups
        is_large = len(step.src.ranks) + len(step.dst.ranks) > MAX_COUNTED_RANKS
        legs = legs_of(step, item_bytes, self.topology) if is_large else None
        if legs is None:
            yield from self._counted(step, item_bytes, call)
            return
        for leg in legs:
            through = np.zeros(self.starts[-1], np.int64)
            for level in range(len(self.topology.levels)):
                np.add.at(through, self._of(level, leg.senders, OUT), leg.leaving[level])
                np.add.at(through, self._of(level, leg.ranks, IN), leg.entering[level])
            yield self._load(through, leg.rounds, call)

    def _counted(self, step: Step, item_bytes: int, call: object) -> Iterator[Load]:
        for moves in step.moves(self.topology):
            sent = [move for move in moves if move.src_rank != move.dst_rank]
            ends = [move.src_rank for move in sent], [move.dst_rank for move in sent]
            num_bytes = np.array([move.box.num_elements for move in sent], np.int64) * item_bytes
            through = np.zeros(self.starts[-1], np.int64)
            for level in range(len(self.topology.levels)):
                out, into = (self._of(level, ranks, way) for way, ranks in enumerate(ends))
                is_outside = out + IN != into
                np.add.at(through, out[is_outside], num_bytes[is_outside])
                np.add.at(through, into[is_outside], num_bytes[is_outside])
            pairs = np.array(sorted(set(zip(*ends, strict=True))), np.int64).reshape(-1, 2)
            partners = [np.unique(pairs[:, way], return_counts=True)[1] for way in (OUT, IN)]
            yield self._load(through, max(int(n.max(initial=0)) for n in partners), call)

    def _of(self, level: int, ranks: Sequence[int], way: int) -> Counts:
        home, start = self.topology.homes[level], int(self.starts[level])
        return np.array([start + 2 * home[rank] + way for rank in ranks], np.int64)

    def _load(self, through: Counts, rounds: int, call: object) -> Load:
        ports = np.flatnonzero(through)
        ranks = np.unique(ports[ports < self.starts[1]] // 2)
        return Load(ports, through[ports], ranks, rounds, call)

    # --- time -----------------------------------------------------------------------------------

    def cost(self, loads: Iterable[tuple[Load, Counts, bool]]) -> StepCost:
        """What loads cost that run at once.

        Args:
            loads: each with the bytes that it has of every port, and whether its messages are
                joined with those of the same call.
        """
        loads = list(loads)
        if not loads:
            return StepCost(0.0, 0, 0, 0, {})
        ports = np.concatenate([load.ports for load, *_ in loads])
        # Whole numbers below 2**53: their sums as floats are exact.
        weights = np.concatenate([num_bytes for _, num_bytes, _ in loads])
        found = np.bincount(ports, weights, self.starts[-1]).astype(np.int64)
        into = [level[IN::2] for level in self._by_level(found)]
        rounds = self._rounds(loads)
        return StepCost(
            port_secs(self._busiest(found), rounds, self.topology),
            wire_bytes=int(into[0].sum()),
            host_bytes=int(into[1].sum()) if len(into) > 1 else 0,
            rounds=rounds,
            recv_bytes={self.ranks[i]: int(into[0][i]) for i in np.flatnonzero(into[0])},
        )

    def busiest_bytes(self, loads: Iterable[tuple[Load, int]]) -> tuple[int, ...]:
        """Bytes through the busiest port of every level, of loads that come so many times."""
        found = np.zeros(self.starts[-1], np.int64)
        for load, count in loads:
            found[load.ports] += load.num_bytes * count
        return self._busiest(found)

    def _busiest(self, through: Counts) -> tuple[int, ...]:
        return tuple(int(level.max()) for level in self._by_level(through))

    def _by_level(self, through: Counts) -> list[Counts]:
        return [through[a:b] for a, b in zip(self.starts, self.starts[1:], strict=False)]

    def _rounds(self, loads: Iterable[tuple[Load, Counts, bool]]) -> int:
        """Messages of the busiest rank; a joined collective has those of its largest load."""
        of_rank = np.zeros(len(self.ranks), np.int64)
        joined: dict[object, Counts] = {}
        for load, _, is_joined in loads:
            if is_joined:
                mine = joined.setdefault(load.call, np.zeros_like(of_rank))
                mine[load.ranks] = np.maximum(mine[load.ranks], load.rounds)
            else:
                of_rank[load.ranks] += load.rounds
        return int(sum(joined.values(), of_rank).max())


def beat_costs(
    ways: Sequence[Way], batch: Batch, loads: Mapping[Way, Sequence[Load]], ports: Ports
) -> Iterator[StepCost]:
    """What every beat of the batch's program costs.

    A bucket begins one beat after the bucket before it, and is one exchange farther in every beat.
    All that happens in a beat happens at once, as in the program (``program/slices.interleaved``).
    """
    beats: dict[int, list[tuple[Load, Counts, bool]]] = {}
    num_lanes = [way.num_lanes(n) for way, n in zip(ways, batch.num_slices, strict=True)]
    for first, bucket in enumerate(batch.buckets):
        for tensor, lane in bucket:
            way = ways[tensor]
            for beat, load in enumerate(loads[way], first):
                part = load.part(lane, num_lanes[tensor])
                beats.setdefault(beat, []).append((load, part, way.is_small))
    for beat in sorted(beats):
        yield ports.cost(beats[beat])
