"""The native core gives the results of the Python definition on every pair."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from socket import socketpair
from typing import Any

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.native import core
from rvdcomm.plans import Simulation, simulate_program
from rvdcomm.program import ALIGN_BYTES, SRC, Program
from rvdcomm.program.lower import lower
from rvdcomm.run.rank_program import _parts
from rvdcomm.run.schedule import Finish, Start, schedules
from rvdcomm.run.stage import native_stage
from tests.oracle import Array, all_pairs, parts_of, random_pair, random_topology, shards_of

pytestmark = pytest.mark.native

ONE_HOST = rv.Topology.single_host(8, 0, 1.0)
TWO_HOSTS = rv.Topology.hosts([range(3), range(3, 6)], rv.Link(0, 4.0), rv.Link(0, 1.0))
GATHER = rv.Layout((6, 8), "R(1)V(1)D(2,1)"), rv.Layout((6, 8), "R(2)V(1)D(1,1)")
TIMEOUT_SECS = 20.0


class Memory(Simulation):
    """Shards and arenas of all ranks, at addresses that native stages can use."""

    def bind(self, stage: Any, ranks: Sequence[int], *domain: Any) -> None:
        signals = domain[0] if domain else None
        arenas = [self.arena[rank].ctypes.data for rank in ranks]
        stage.bind(arenas, signals, TIMEOUT_SECS)

    def addresses(self, rank: int) -> tuple[int, ...]:
        names = self.program.shard_names(rank)
        return tuple(self.flat[name, rank].ctypes.data for name in names)

    def call_twice(self, stage: Any, rank: int, totals: Sequence[int]) -> None:
        """The second call fails if two ranks counted the events of the first call differently."""
        for identity in (7, 8):
            stage.call(self.addresses(rank), 1, identity, totals)


def run_by_messages(program: Program, shards: dict[int, Array]) -> dict[int, Array]:
    """Run the native stages of all ranks, one rank after another up to its next transfer."""
    memory = Memory(program, {(SRC, rank): shard for rank, shard in shards.items()})
    waiting = {rank: list(_parts(s.actions)) for rank, s in schedules(program).items()}
    started: dict[int, set[int]] = {}
    moved: set[int] = set()
    while any(waiting.values()):
        for rank, parts in waiting.items():
            while parts:
                part = parts[0]
                if isinstance(part, Finish):
                    key = id(part.collective)
                    if started[key] != set(part.collective.ranks):
                        break
                    if key not in moved:
                        moved.add(key)
                        memory._collective(part.collective)
                elif isinstance(part, Start):
                    started.setdefault(id(part.collective), set()).add(rank)
                else:
                    stage = native_stage(program, rank, (rank,), part)
                    memory.bind(stage, [rank])
                    stage.run(memory.addresses(rank), 1)
                parts.pop(0)
    return {rank: shard for (_, rank), shard in memory.results().items()}


def run_by_reading(program: Program, shards: dict[int, Array]) -> dict[int, Array]:
    """Run the native stages of all ranks at once, one thread each, with signals between them."""
    memory = Memory(program, {(SRC, rank): shard for rank, shard in shards.items()})
    found = schedules(program)
    alone = set(program.ranks) - {rank for group in program.peer_groups for rank in group}
    with ExitStack() as sockets, ThreadPoolExecutor(len(program.ranks)) as threads:
        running = []
        for group in (*program.peer_groups, *((rank,) for rank in sorted(alone))):
            headers = [_header() for _ in group]
            pairs = [socketpair() for _ in group]
            for end in (end for pair in pairs for end in pair):
                sockets.enter_context(end)
            for i, rank in enumerate(group):
                lifelines = [-1 if j == i else pair[0].fileno() for j, pair in enumerate(pairs)]
                stage = native_stage(program, rank, group, found[rank].actions)
                signals = core.Signals(i, headers, lifelines)
                memory.bind(stage, group, signals)
                totals = [found[rank].totals[member] for member in group]
                running.append(threads.submit(memory.call_twice, stage, rank, totals))
        for future in running:
            future.result()
    return {rank: shard for (_, rank), shard in memory.results().items()}


def _header() -> Array:
    page = np.zeros(2 * core.HEADER_BYTES, np.uint8)
    start = -page.ctypes.data % ALIGN_BYTES
    core.format_header(page[start : start + core.HEADER_BYTES])
    return page[start : start + core.HEADER_BYTES]


def faults(
    src: rv.Layout, dst: rv.Layout, topology: rv.Topology, domains: Sequence[Sequence[int]]
) -> list[str]:
    """Where the native core and the definition differ, bit for bit."""
    shards = shards_of(src, parts_of(src, "int64"))
    path = rv.plan(src, dst, "int64", topology).path
    runs = {}
    by_messages = lower(path, "int64", topology)
    runs["by messages"] = run_by_messages(by_messages, shards), by_messages
    for num_slices in (1, 2):
        near = lower(path, "int64", topology, domains=domains, num_slices=num_slices)
        runs[f"by reading, {num_slices} slices"] = run_by_reading(near, shards), near
    return [
        f"{src} -> {dst}, {how}: rank {rank}"
        for how, (got, program) in runs.items()
        for rank, want in simulate_program(program, shards).shards.items()
        if not np.array_equal(got[rank], want)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_native_stages_agree_with_the_definition_on_every_pair(num_ranks: int) -> None:
    host = rv.Topology.single_host(num_ranks, 0, 1.0)
    found = []
    for src, dst in all_pairs((6, 8), num_ranks):
        found += faults(src, dst, host, [range(num_ranks)])
    assert found == []


def test_native_stages_agree_on_pairs_of_six_and_eight_ranks() -> None:
    rng = random.Random(6)
    found = []
    for src, dst in rng.sample(list(all_pairs((12, 18), 6)), 60):
        found += faults(src, dst, TWO_HOSTS, [range(6)])
    for src, dst in rng.sample(list(all_pairs((8, 16, 4), 8)), 60):
        found += faults(src, dst, ONE_HOST, [range(8)])
    assert found == []


def test_calls_of_different_identities_fail_on_both_sides() -> None:
    program = lower(rv.plan(*GATHER, "int64", ONE_HOST).path, "int64", ONE_HOST, domains=[range(2)])
    memory = Memory(program, {(SRC, rank): np.zeros((3, 8), np.int64) for rank in range(2)})
    headers = [_header() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        calls = []
        for rank, schedule in schedules(program).items():
            stage = native_stage(program, rank, (0, 1), schedule.actions)
            memory.bind(stage, (0, 1), core.Signals(rank, headers, [-1, -1]))
            totals = list(schedule.totals.values())
            calls.append(threads.submit(stage.call, memory.addresses(rank), 1, rank, totals))
        errors = [call.exception(TIMEOUT_SECS) for call in calls]
    assert [type(error) for error in errors] == [core.PeerError] * 2


@pytest.mark.parametrize("seed", range(6))
def test_native_stages_agree_on_irregular_pairs(seed: int) -> None:
    rng = random.Random(seed)
    (src, dst), topology = random_pair(rng), random_topology(rng)
    assert faults(src, dst, topology, [sorted({*src.ranks, *dst.ranks})]) == []
