"""Processes give the same data as ``simulate``, and send the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import rvdcomm as rv
from rvdcomm.plans import plan_with
from tests.dist.world import Worlds
from tests.oracle import Array, all_pairs, drawn, parts_of, random_layout, random_shape, shards_of

pytestmark = pytest.mark.dist

# --- transitions --------------------------------------------------------------------------------

GROUP_SIZES = {
    3: [(2, 3), (3, 3), (1, 2), (2, 2)],
    4: [(4, 3), (4, 4), (2, 2), (1, 3), (2, 1)],
    6: [(2, 3), (6, 4), (4, 6), (6, 6)],
    8: [(3, 4), (8, 8), (2, 6), (3, 5), (5, 3), (7, 5), (6, 7)],
}
"""Ranks of src and of dst in every world."""

RELATIONS = ("same", "disjoint", "overlap")


@dataclass(frozen=True)
class Case:
    """One seeded transition in a world."""

    num_ranks: int
    num_src: int
    num_dst: int
    relation: str
    seed: int

    def __str__(self) -> str:
        return f"{self.num_ranks}-{self.num_src}to{self.num_dst}-{self.relation}-{self.seed}"

    def groups(self, rng: random.Random) -> tuple[list[int], list[int]]:
        pool = rng.sample(range(self.num_ranks), self.num_ranks)
        first, last = _starts(self)
        start = rng.randint(first, last)
        return pool[: self.num_src], pool[start : start + self.num_dst]

    def transition(self) -> tuple[rv.Layout, rv.Layout, rv.Topology | None]:
        rng = random.Random(str(self))
        # Awkward sizes are mostly one exchange; those that all counts divide take several steps.
        shape = random_shape(rng) if self.seed % 2 else rng.choice([(24,), (12, 24), (24, 8, 12)])
        src_ranks, dst_ranks = self.groups(rng)
        src, dst = random_layout(rng, shape, src_ranks), random_layout(rng, shape, dst_ranks)
        return src, dst, random_topology(rng, self.num_ranks)


def _starts(case: Case) -> tuple[int, int]:
    """First and last place in the pool of ranks where dst may start; src starts at 0."""
    last = case.num_ranks - case.num_dst
    if case.relation == "same":
        return (0, 0) if case.num_src == case.num_dst else (0, -1)
    if case.relation == "disjoint":
        return case.num_src, last
    low = 1 if case.num_src == case.num_dst else 0
    return low, min(case.num_src - 1, last)


def _cases() -> Iterator[Case]:
    for num_ranks, sizes in GROUP_SIZES.items():
        for num_src, num_dst in sizes:
            for relation in RELATIONS:
                case = Case(num_ranks, num_src, num_dst, relation, 0)
                first, last = _starts(case)
                if first <= last:
                    yield case


CASES = [replace(case, seed=i % 3) for i, case in enumerate(_cases())]

IN_GROUP = [
    (num_ranks, num_hosts, shape, str(src.rvd), str(dst.rvd))
    for num_ranks, num_hosts, shape in (
        (4, 1, (8, 12)),
        (6, 2, (18,)),
        (8, 1, (24,)),
        (8, 2, (24,)),
    )
    for src, dst in drawn(all_pairs(shape, num_ranks), 0.07, f"{num_ranks} on {num_hosts}")
]
"""Ranks, hosts, shape, src and dst of a fourteenth of the pairs of regular layouts of one group.

On all pairs, simulated programs are right (tests/plans/test_plan.py).
"""


def random_topology(rng: random.Random, num_ranks: int) -> rv.Topology | None:
    """One host, or some hosts of shuffled ranks with a link of any speed between them."""
    num_hosts = rng.choice([1, 2, 2, 3])
    if num_hosts == 1 or num_ranks < num_hosts:
        return None
    pool = rng.choice([list(range(num_ranks)), rng.sample(range(num_ranks), num_ranks)])
    cuts = [0, *sorted(rng.sample(range(1, num_ranks), num_hosts - 1)), num_ranks]
    if num_ranks % num_hosts == 0 and rng.random() < 0.5:
        cuts = list(range(0, num_ranks + 1, num_ranks // num_hosts))
    hosts = [pool[a:b] for a, b in pairwise(cuts)]
    alpha_secs = rng.choice([0.0, 1e-5])
    return rv.Topology.hosts(hosts, rv.Link(alpha_secs, 8e9), rv.Link(alpha_secs, 1e9))


def test_cases_include_unequal_group_sizes_in_every_relation() -> None:
    seen = {(case.num_src, case.num_dst, case.relation) for case in CASES}
    wanted = {(2, 3), (3, 4), (3, 5), (5, 3)}
    assert seen >= {(*sizes, relation) for sizes in wanted for relation in RELATIONS[1:]}
    assert len(CASES) >= 30


def free_rounds(num_ranks: int, num_hosts: int) -> rv.Topology:
    """Equal hosts, where rounds cost nothing: plans then move the fewest bytes."""
    size = num_ranks // num_hosts
    hosts = [range(i, i + size) for i in range(0, num_ranks, size)]
    return rv.Topology.hosts(hosts, rv.Link(0.0, 8e9), rv.Link(0.0, 1e9))


# --- on the ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """What one rank saw of a transition."""

    results: dict[str, Array | None]
    is_input_unchanged: bool
    sent_bytes: dict[str, int]


def move(
    rank: int,
    src: rv.Layout,
    dst: rv.Layout,
    topology: rv.Topology | None,
    shards: dict[int, Array],
) -> Moved | None:
    """Redistribute, and run the same plan twice more with every executor."""
    if rank not in src and rank not in dst:
        return None
    tensor = torch.from_numpy(shards[rank].copy()) if rank in src else None
    results = {"redistribute": rv.redistribute(tensor, src, dst, topology=topology)}
    sent_bytes = {}
    for executor in ("dist", "auto"):
        compiled = rv.Redistributor(rv.plan(src, dst, "float32", topology), executor=executor)
        for call in ("first", "second"):
            results[f"{executor}, {call} call"] = compiled(tensor)
        sent_bytes[executor] = compiled.sent_bytes
    is_unchanged = tensor is None or tensor.numpy().tobytes() == shards[rank].tobytes()
    arrays = {name: None if t is None else t.numpy() for name, t in results.items()}
    return Moved(arrays, is_unchanged, sent_bytes)


def is_near(got: Array, want: Array, tolerance: Array) -> bool:
    return got.shape == want.shape and bool((np.abs(got - want) <= tolerance).all())


def faults_of_moved(
    moved: list[Moved | None], plan: rv.Plan, want: rv.SimulationResult, tolerance: dict[int, Array]
) -> list[str]:
    """Differences between the results of the ranks and of ``simulate``."""
    faults = []
    for rank, seen in enumerate(moved):
        if seen is None:
            continue
        for name, got in seen.results.items():
            if rank not in plan.dst:
                faults += [f"rank {rank} is not in dst but has a result: {name}"] * (
                    got is not None
                )
            elif got is None or not is_near(got, want.shards[rank], tolerance[rank]):
                faults.append(f"rank {rank}: {name} is {got}, simulate has {want.shards[rank]}")
        if not seen.is_input_unchanged:
            faults.append(f"rank {rank}: the input was modified")
        if seen.sent_bytes["dist"] != want.sent_bytes[rank]:
            sent = seen.sent_bytes["dist"], want.sent_bytes[rank]
            faults.append(f"rank {rank}: sent {sent[0]} bytes, simulate counts {sent[1]}")
    # A read from the first owner may save a second move of a byte; the plan counts that.
    near = rv.plan(plan.src, plan.dst, "float32", plan.topology)
    total = sum(seen.sent_bytes["auto"] for seen in moved if seen is not None)
    if total != near.cost.wire_bytes:
        faults.append(f"all sent {total} bytes, the plan says {near.cost.wire_bytes}")
    return faults


def check(
    worlds: Worlds,
    num_ranks: int,
    transition: tuple[rv.Layout, rv.Layout, rv.Topology | None],
    parts: list[Array],
    tolerance: dict[int, Array] | None = None,
) -> None:
    """Check what processes do with the shards of these parts, exactly if there is no tolerance."""
    src, dst, topology = transition
    shards = shards_of(src, parts)
    # Another executor keeps the path of a plan, also where a plan for that executor has another.
    plan = plan_with(rv.plan(src, dst, "float32", topology), executor="dist")
    want = rv.simulate(plan, shards)
    if tolerance is None:
        tolerance = {rank: np.zeros(shard.shape) for rank, shard in want.shards.items()}
    moved = worlds(num_ranks).run(move, src, dst, topology, shards)
    assert faults_of_moved(moved, plan, want, tolerance) == []


# --- laws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_move_integers_as_simulate_does(worlds: Worlds, case: Case) -> None:
    transition = case.transition()
    check(worlds, case.num_ranks, transition, parts_of(transition[0], "float32", case.seed))


@pytest.mark.parametrize("num_ranks, num_hosts, shape, src_rvd, dst_rvd", IN_GROUP)
def test_processes_move_pairs_in_a_group_as_simulate_does(
    worlds: Worlds,
    num_ranks: int,
    num_hosts: int,
    shape: tuple[int, ...],
    src_rvd: str,
    dst_rvd: str,
) -> None:
    src, dst = rv.Layout(shape, src_rvd), rv.Layout(shape, dst_rvd)
    transition = src, dst, free_rounds(num_ranks, num_hosts)
    check(worlds, num_ranks, transition, parts_of(src, "float32"))


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_processes_move_floats_as_simulate_does_to_rounding(worlds: Worlds, case: Case) -> None:
    src, dst, topology = case.transition()
    rng = np.random.default_rng(case.seed)
    parts = [rng.standard_normal(src.shape, dtype=np.float32) for _ in range(src.rvd.v)]
    # Two orders of adding v numbers x_i differ by at most 2 (v - 1) u sum|x_i|, u = 2**-24; v = 1
    # moves are exact. Shards under dst with V > 1 are sums of some of the parts.
    size = np.abs(np.array(parts)).sum(axis=0) * np.float32(2 * (src.rvd.v - 1) * 2.0**-24)
    tolerance = shards_of(dst, [size] * dst.rvd.v)
    check(worlds, case.num_ranks, (src, dst, topology), parts, tolerance)
