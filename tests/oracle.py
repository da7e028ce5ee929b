"""The dense oracle: it holds whole tensors in one process; expected shards are slices of them.

A tensor with V > 1 (partial sums) is a list of *parts*: whole tensors whose sum is the tensor.
Values are integers, so that sums are exact in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np

import rvdcomm as rv
from rvdcomm import SimulationResult
from rvdcomm.layout import Box
from rvdcomm.plans import Simulation, simulate_program
from rvdcomm.program import BufferKey, Collective, Entry, Instruction, Message, Program

Array = np.ndarray

# --- layouts ------------------------------------------------------------------------------------


def factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``number`` as an ordered product of ``num_factors`` factors."""
    if num_factors == 1:
        yield (number,)
        return
    for first in (f for f in range(1, number + 1) if number % f == 0):
        for rest in factorizations(number // first, num_factors - 1):
            yield (first, *rest)


def all_rvds(num_ranks: int, num_dims: int) -> list[rv.RVD]:
    """Every RVD of ``num_ranks`` ranks in ``num_dims`` dims."""
    return [rv.RVD(r, v, tuple(d)) for r, v, *d in factorizations(num_ranks, num_dims + 2)]


def all_layouts(shape: Sequence[int], num_ranks: int) -> list[rv.Layout]:
    """A layout of ``shape`` over ranks ``0`` to ``num_ranks - 1`` for every RVD."""
    return [rv.Layout(shape, rvd) for rvd in all_rvds(num_ranks, len(shape))]


def all_pairs(shape: Sequence[int], num_ranks: int) -> Iterator[tuple[rv.Layout, rv.Layout]]:
    """Every ordered pair of the layouts that ``all_layouts`` returns."""
    layouts = all_layouts(shape, num_ranks)
    return product(layouts, layouts)


Pair = tuple[rv.Layout, rv.Layout]


def drawn(pairs: Iterable[Pair], share: float, seed: str) -> list[Pair]:
    """A random share of the pairs, equal for equal seeds."""
    found = list(pairs)
    return random.Random(seed).sample(found, round(share * len(found)))


# --- the oracle ---------------------------------------------------------------------------------


def parts_of(layout: rv.Layout, dtype: str = "int64", seed: int = 0) -> list[Array]:
    """Random parts of a tensor, with values so small that their sums do not overflow ``dtype``."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return [rng.integers(0, 2, layout.shape).astype(bool) for _ in range(layout.rvd.v)]
    top = 1000 if np.dtype(dtype).itemsize > 2 else 100 // layout.rvd.v
    low = -top if np.dtype(dtype).kind != "u" else 0
    return [rng.integers(low, top, layout.shape).astype(dtype) for _ in range(layout.rvd.v)]


def sliced(tensor: Array, box: Box) -> Array:
    """The view of ``box`` in a whole tensor."""
    return tensor[(..., *box.slices_within(Box.of_shape(tensor.shape)))]


def shards_of(layout: rv.Layout, parts: Sequence[Array]) -> dict[int, Array]:
    """The shard of every rank: the box of the rank's cell, copied from the part of the cell."""
    cells = {rank: layout.cell(rank) for rank in layout.ranks}
    return {rank: sliced(parts[cell.part], cell.box).copy() for rank, cell in cells.items()}


def simulate_many(
    program: Program, shards: Mapping[BufferKey, Array]
) -> tuple[dict[BufferKey, Array], SimulationResult]:
    """Simulate a program of several tensors; returns the dst shards, and the simulated bytes.

    ``shards`` maps (buffer, rank) to the src shard. If the program converts dtypes, numpy must have
    these dtypes.
    """
    done = Simulation(program, shards)
    done.run()
    return done.results(), SimulationResult({}, done.recv, done.sent, done.peak)


def reassembled(layout: rv.Layout, shards: Mapping[int, Array]) -> Array:
    """The whole tensor: the sum of the parts of one replica; raises if replicas differ."""
    total = np.zeros(layout.shape, next(iter(shards.values())).dtype)
    first: dict[tuple[int, Box], int] = {}
    for rank in layout.ranks:
        cell = layout.cell(rank)
        if shards[rank].shape != cell.box.shape:
            raise AssertionError(f"rank {rank} has {shards[rank].shape}, not {cell.box.shape}")
        other = first.setdefault((cell.part, cell.box), rank)
        if other != rank:
            if not np.array_equal(shards[other], shards[rank]):
                raise AssertionError(f"replicas differ on ranks {other} and {rank}")
            continue
        view = sliced(total, cell.box)
        view[...] = np.add(view, shards[rank]) if total.dtype != bool else view | shards[rank]
    return total


def data_faults(dst: rv.Layout, shards: Mapping[int, Array], parts: Sequence[Array]) -> list[str]:
    """The faults of dst shards, compared with the sum of ``parts``; empty if there are none."""
    try:
        got = reassembled(dst, shards)
    except AssertionError as error:
        return [str(error)]
    want = np.sum(parts, axis=0, dtype=parts[0].dtype)
    return [] if np.array_equal(got, want) else [f"{(got != want).sum()} elements are wrong"]


def program_faults(program: Program, seed: int = 0) -> list[str]:
    """The faults in the result of a simulated run of ``program``."""
    parts = parts_of(program.src, program.dtype, seed)
    result = simulate_program(program, shards_of(program.src, parts))
    return data_faults(program.dst, result.shards, parts)


def restricted(program: Program, ranks: Collection[int]) -> Program:
    """Reduce a program of all ranks to the content of a program that was lowered for ``ranks``.

    Buffers, instructions and messages without any of ``ranks`` are removed. Buffer names of other
    ranks become "?", and numbers of their pieces become -1.
    """

    def of(one: Instruction) -> Instruction:
        if not isinstance(one, Collective):
            return one
        side = {
            name: tuple(b if r in ranks else "?" for r, b in zip(one.ranks, names, strict=True))
            for name, names in (("src", one.src), ("dst", one.dst))
        }
        messages = tuple(
            replace(m, entries=tuple(map(partial(entry, m), m.entries)))
            for m in one.messages
            if m.src_rank in ranks or m.dst_rank in ranks
        )
        return replace(one, **side, messages=messages)

    def entry(message: Message, e: Entry) -> Entry:
        src = e.src_piece if message.src_rank in ranks else -1
        return Entry(e.box, src, e.dst_piece if message.dst_rank in ranks else -1)

    buffers = tuple(buffer for buffer in program.buffers if buffer.rank in ranks)
    kept = tuple(of(one) for one in program.instructions if not set(ranks).isdisjoint(one.ranks))
    return replace(program, buffers=buffers, instructions=kept, members=tuple(sorted(ranks)))


def local_faults(whole: Program, lowered: Callable[[int], Program]) -> list[str]:
    """The ranks whose program, lowered for one rank, differs from ``restricted(whole, ...)``."""
    wrong = []
    for rank in whole.ranks:
        alone = lowered(rank)
        want = restricted(whole, alone.here)
        if set(alone.buffers) != set(want.buffers):
            wrong.append(f"rank {rank}: buffers")
        elif replace(alone, buffers=()) != replace(want, buffers=()):
            wrong.append(f"rank {rank}: {alone}, of all: {want}")
        elif alone.arena(rank) != whole.arena(rank):
            wrong.append(f"rank {rank}: memory")
    return wrong


def plan_faults(plan: rv.Plan, seed: int = 0) -> list[str]:
    """The faults of a plan: wrong data, a failed proof, or costs unequal to simulated costs."""
    faults: list[str] = []
    try:
        plan.verify()
    except rv.ProgramError as error:
        faults.append(f"verify: {error}")
    parts = parts_of(plan.src, plan.dtype, seed)
    result = rv.simulate(plan, shards_of(plan.src, parts))
    faults += data_faults(plan.dst, result.shards, parts)
    counted = {
        "wire_bytes": (plan.cost.wire_bytes, result.wire_bytes),
        "wire_bytes received": (plan.cost.wire_bytes, sum(result.recv_bytes.values())),
        "recv_bytes": (plan.cost.recv_bytes, max(result.recv_bytes.values())),
        "peak_bytes": (plan.cost.peak_bytes, max(result.peak_bytes.values())),
    }
    faults += [f"{name}: cost {a}, simulated {b}" for name, (a, b) in counted.items() if a != b]
    return faults


def sweep(
    pairs: Iterable[tuple[rv.Layout, rv.Layout]], topology: rv.Topology | None = None
) -> list[str]:
    """Plan every pair and list all faults, each with its pair."""
    found: list[str] = []
    for src, dst in pairs:
        try:
            faults = plan_faults(rv.plan(src, dst, "int64", topology))
        except Exception as error:  # An error of one pair must not hide the faults of others.
            faults = [f"{type(error).__name__}: {error}"]
        found += [f"{src} -> {dst}: {fault}" for fault in faults]
    return found


# --- random transitions -------------------------------------------------------------------------

WORLD = 16
"""Number of ranks of every random topology."""

GROUP_SIZES = (
    *((2, 3), (3, 2), (3, 4), (4, 6), (6, 4), (5, 7), (7, 5)),
    *((1, 3), (3, 1), (2, 8), (8, 4), (4, 4), (6, 6), (8, 8)),
)
"""Numbers of ranks of (src, dst)."""


def random_cuts(rng: random.Random, shape: Sequence[int], rvd: rv.RVD) -> str | list[list[int]]:
    """A rule for cuts, or random cut points, which give unequal and sometimes empty boxes."""
    rule = rng.choice(["chunk", "balanced", "explicit"])
    if rule != "explicit":
        return rule
    return [
        [0, *sorted(rng.randint(0, size) for _ in range(count - 1)), size]
        for size, count in zip(shape, rvd.d, strict=True)
    ]


def random_layout(rng: random.Random, shape: Sequence[int], ranks: Iterable[int]) -> rv.Layout:
    """A layout with a random RVD and random cuts; in most layouts, the ranks are shuffled."""
    order = list(ranks)
    if rng.random() < 0.7:
        rng.shuffle(order)
    rvd = rng.choice(all_rvds(len(order), len(shape)))
    return rv.Layout(shape, rvd, order, random_cuts(rng, shape, rvd))


def random_shape(rng: random.Random) -> tuple[int, ...]:
    """A shape of 0 to 6 dims with random small sizes; in some shapes, the first size is 0."""
    num_dims = rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4, 6])
    shape = tuple(rng.randint(1, 14 if num_dims < 3 else 5) for _ in range(num_dims))
    return (0, *shape[1:]) if shape and rng.random() < 0.03 else shape


def random_groups(rng: random.Random) -> tuple[list[int], list[int]]:
    """Ranks of src and dst: the same group, disjoint groups, or groups that may partly overlap."""
    pool = rng.sample(range(WORLD), WORLD)
    num_src, num_dst = rng.choice(GROUP_SIZES)
    relation = rng.choice(["same", "disjoint", "overlap"])
    if relation == "same" and num_src == num_dst:
        return pool[:num_src], pool[:num_src]
    start = num_src if relation == "disjoint" else rng.randint(0, num_src)
    return pool[:num_src], pool[start : start + num_dst]


def random_pair(rng: random.Random) -> tuple[rv.Layout, rv.Layout]:
    """A random transition: two random layouts of one shape."""
    shape = random_shape(rng)
    src_ranks, dst_ranks = random_groups(rng)
    return random_layout(rng, shape, src_ranks), random_layout(rng, shape, dst_ranks)


def random_link(rng: random.Random) -> rv.Link:
    """A link with a random latency and a random bandwidth."""
    return rv.Link(rng.choice([0.0, 1e-6, 3e-5]), rng.choice([1.0, 1e8, 7e8, 3e9]))


def random_topology(rng: random.Random) -> rv.Topology:
    """One host, equal hosts, unequal hosts of shuffled ranks, or hosts in racks."""
    kind = rng.choice(["one", "equal", "unequal", "racks"])
    if kind == "one":
        link = random_link(rng)
        return rv.Topology.single_host(WORLD, link.alpha_secs, link.bytes_per_sec)
    intra, inter = random_link(rng), random_link(rng)
    if kind == "equal":
        size = rng.choice([2, 4, 8])
        hosts = [range(i, i + size) for i in range(0, WORLD, size)]
        return rv.Topology.hosts(hosts, intra, inter)
    pool = rng.sample(range(WORLD), WORLD)
    bounds = [0, *sorted(rng.sample(range(1, WORLD), rng.randint(1, 4))), WORLD]
    hosts = [pool[a:b] for a, b in pairwise(bounds)]
    topology = rv.Topology.hosts(hosts, intra, inter)
    if kind == "unequal" or len(hosts) < 3:
        return topology
    racks = (tuple(hosts[0]), tuple(rank for host in hosts[1:] for rank in host))
    return rv.Topology((*topology.levels, rv.Level("rack", racks, random_link(rng))))
