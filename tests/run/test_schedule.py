"""Laws of schedules: right data at any speed of the ranks, and no deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.plans import Simulation
from rvdcomm.program import DST, SRC, Collective, Copy, Program
from rvdcomm.program.lower import lower
from rvdcomm.run.schedule import Advance, Await, Do, Finish, Start, schedule, schedules
from tests.oracle import all_pairs, data_faults, parts_of, random_pair, random_topology, shards_of

ONE_HOST = rv.Topology.single_host(8, 0, 1.0)
TWO_HOSTS = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(0, 4.0), rv.Link(0, 1.0))
ISLANDS = {"none": (), "one": (range(8),), "two": (range(4), range(4, 8)), "odd": ((1, 3), (0, 2))}


class Race:
    """Runs the schedules of all ranks, a random rank per step, without a barrier between calls."""

    def __init__(self, program: Program, rng: random.Random, calls: list[dict[int, np.ndarray]]):
        self.program, self.rng, self.calls = program, rng, calls
        self.memory = Simulation(program, {(SRC, r): shard for r, shard in calls[0].items()})
        self.counts = dict.fromkeys(program.ranks, 0)
        self.results: list[dict[int, np.ndarray]] = [{} for _ in calls]
        # By call and collective: the ranks that have started it, and whether its messages moved.
        self.started: dict[tuple[int, int], set[int]] = {}
        self.moved: set[tuple[int, int]] = set()

    def run(self) -> list[dict[int, np.ndarray]]:
        found = schedules(self.program)
        running = {
            rank: self._rank(rank, found[rank].actions, found[rank].totals) for rank in found
        }
        waiting = dict(running)
        stuck = 0
        while waiting:
            rank = self.rng.choice(list(waiting))
            try:
                stuck = 0 if next(waiting[rank]) else stuck + 1
            except StopIteration:
                del waiting[rank]
                stuck = 0
            assert stuck < 50 * len(self.program.ranks), f"ranks {sorted(waiting)} wait for ever"
        return self.results

    def _rank(self, rank: int, actions: Sequence[object], totals: dict[int, int]) -> Iterator[bool]:
        """The steps of one rank; False where it has to wait."""
        base = dict.fromkeys(totals, 0)
        for number, shards in enumerate(self.calls):
            if rank in self.program.src:
                self.memory.flat[SRC, rank][:] = shards[rank].reshape(-1)
            if (DST, rank) in self.memory.flat:
                self.memory.flat[DST, rank].view(np.uint8)[:] = 0xA5
            for action in actions:
                match action:
                    case Await(peer, count):
                        while self.counts[peer] < base[peer] + count:
                            yield False
                    case Advance():
                        self.counts[rank] += 1
                    case Start(collective):
                        self._start(number, collective, rank)
                    case Finish(collective):
                        while self.started[number, id(collective)] != set(collective.ranks):
                            yield False
                        self._move(number, collective)
                    case Do(instruction) if isinstance(instruction, Copy):
                        self.memory._copy(instruction)
                    case Do(instruction):
                        self.memory._zero(instruction)
                yield True
            base = {peer: count + totals[peer] for peer, count in base.items()}
            if (DST, rank) in self.memory.flat:
                shape = self.program.dst.cell(rank).box.shape
                self.results[number][rank] = self.memory.flat[DST, rank].copy().reshape(shape)

    def _start(self, number: int, collective: Collective, rank: int) -> None:
        started = self.started.setdefault((number, id(collective)), set())
        started.add(rank)
        if started == set(collective.ranks) and self.rng.random() < 0.5:
            self._move(number, collective)

    def _move(self, number: int, collective: Collective) -> None:
        if (number, id(collective)) not in self.moved:
            self.moved.add((number, id(collective)))
            self.memory._collective(collective)


def race_faults(program: Program, seed: int) -> list[str]:
    parts = [parts_of(program.src, program.dtype, seed + i) for i in range(3)]
    results = Race(program, random.Random(seed), [shards_of(program.src, p) for p in parts]).run()
    return [
        fault
        for result, part in zip(results, parts, strict=True)
        for fault in data_faults(program.dst, result, part)
    ]


@pytest.mark.parametrize(
    "name, num_slices, topology",
    [
        ("none", 3, ONE_HOST),
        ("one", 1, TWO_HOSTS),
        ("two", 1, ONE_HOST),
        ("two", 3, TWO_HOSTS),
        ("odd", 1, TWO_HOSTS),
        ("odd", 3, ONE_HOST),
    ],
)
def test_schedules_give_right_data_in_random_interleavings(
    name: str, num_slices: int, topology: rv.Topology
) -> None:
    rng = random.Random(f"{name} {num_slices}")
    found = []
    for src, dst in rng.sample(list(all_pairs((16, 24), 8)), 25):
        path = rv.plan(src, dst, "int64", topology).path
        program = lower(path, "int64", topology, domains=ISLANDS[name], num_slices=num_slices)
        for seed in range(3):
            found += [f"{src.rvd} -> {dst.rvd}: {f}" for f in race_faults(program, seed)]
    assert found == []


@pytest.mark.parametrize("seed", range(6))
def test_schedules_of_irregular_pairs_give_right_data(seed: int) -> None:
    rng = random.Random(seed)
    (src, dst), topology = random_pair(rng), random_topology(rng)
    ranks = sorted({*src.ranks, *dst.ranks})
    half = rng.randrange(1, len(ranks) + 1)
    path = rv.plan(src, dst, "int64", topology).path
    domains = (ranks[:half], ranks[half:])
    program = lower(path, "int64", topology, domains=domains, num_slices=rng.choice([1, 2, 4]))
    assert race_faults(program, seed) == []


def test_schedule_without_domains_has_no_await_and_no_advance() -> None:
    src, dst = (rv.Layout((16, 16), text) for text in ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"))
    actions = schedule(rv.plan(src, dst, executor="dist").program, 0).actions
    assert not any(isinstance(action, Await | Advance) for action in actions)


def test_rank_of_a_gather_counts_two_events_and_awaits_each_peer_twice() -> None:
    src, dst = (rv.Layout((16, 16), text) for text in ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"))
    plan = rv.plan(src, dst)
    program = lower(plan.path, plan.dtype, plan.topology, domains=(range(4),))
    found = schedule(program, 0)
    # One event when its shard can be read, one when it has read the shards of the others.
    assert found.totals == dict.fromkeys(range(4), 2)
    # Once for the readers of the last call, once for the writers of this call.
    assert [a for a in found.actions if isinstance(a, Await)] == [
        *(Await(peer, 0) for peer in (1, 2, 3)),
        *(Await(peer, 1) for peer in (1, 2, 3)),
    ]
