"""Draw: one random transition for every (seed, index), the same in every process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from math import prod

import rvdcomm as rv
from rvdcomm.layout import ITEM_BYTES, NOT_SUMMED
from tests.oracle import Array, all_rvds, parts_of, random_cuts, random_topology

MAX_ELEMENTS = 12_000
"""Largest number of elements of a tensor, so that a pair takes only a few milliseconds."""

MAX_SIZE = 40

STORED_AS = {
    "bfloat16": "uint16",
    **{name: "uint8" for name in ITEM_BYTES if name.startswith("float8")},
}
"""Numpy dtypes of equal size that hold the bits of dtypes which numpy does not have.

Bits can be moved, but not summed.
"""

NUMPY_DTYPES = tuple(name for name in ITEM_BYTES if name != "complex32")
"""Dtypes that can be simulated; numpy has no replacement for complex32."""


@dataclass(frozen=True)
class Case:
    """A transition, with options for planning and lowering.

    ``memory_share`` places a memory limit between the lower bound of the peak memory (0.0) and the
    peak of the cheapest plan (1.0); None for no limit. ``domains`` (shared-memory domains) and
    ``num_slices`` (pipeline slices) are for a second program of the same path; if ``num_slices`` is
    0, there is no second program.
    """

    seed: int
    index: int
    src: rv.Layout
    dst: rv.Layout
    topology: rv.Topology | None
    dtype: str
    memory_share: float | None
    domains: tuple[tuple[int, ...], ...]
    num_slices: int

    def __str__(self) -> str:
        topology = self.topology and [level.groups for level in self.topology.levels[1:]]
        return (
            f"{self.src} -> {self.dst} {self.dtype}, memory share {self.memory_share}, groups "
            f"{topology}, domains {self.domains}, {self.num_slices} slices"
        )

    @property
    def stored_as(self) -> str:
        """The numpy dtype of the shards."""
        return STORED_AS.get(self.dtype, self.dtype)

    def parts(self) -> list[Array]:
        """The value parts: whole tensors of integers whose sum is the tensor."""
        return parts_of(self.src, self.stored_as, self.index)


def draw(
    seed: int, index: int, num_ranks: int = 16, dtypes: tuple[str, ...] = NUMPY_DTYPES
) -> Case:
    """The transition of this index."""
    rng = random.Random(f"{seed}/{index}")
    shape = random_shape(rng)
    src_ranks, dst_ranks = random_groups(rng, num_ranks)
    dtype = rng.choice(dtypes)
    src = random_layout(rng, shape, src_ranks, dtype)
    dst = random_layout(rng, shape, dst_ranks, dtype)
    topology = random_topology(rng) if rng.random() < 0.7 else None
    return Case(
        seed=seed,
        index=index,
        src=src,
        dst=dst,
        topology=topology,
        dtype=dtype,
        memory_share=rng.choice([0.0, rng.random(), 1.0]) if rng.random() < 0.05 else None,
        domains=random_domains(rng, sorted({*src_ranks, *dst_ranks})),
        num_slices=rng.choice([0, 0, 1, 1, 2, 4]),
    )


def random_shape(rng: random.Random) -> tuple[int, ...]:
    """A shape of 0 to 4 dims with any sizes up to 40, or with sizes that have many divisors."""
    num_dims = rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])
    sizes = rng.choice([range(1, 6), range(1, MAX_SIZE + 1), (1, 12, 24, 36), (8, 16, 32)])
    shape = [rng.choice(sizes) for _ in range(num_dims)]
    if shape and rng.random() < 0.03:
        shape[rng.randrange(num_dims)] = 0
    while prod(shape) > MAX_ELEMENTS:
        largest = max(range(num_dims), key=shape.__getitem__)
        shape[largest] = -(-shape[largest] // 2)
    return tuple(shape)


def random_groups(rng: random.Random, num_ranks: int) -> tuple[list[int], list[int]]:
    """Ranks of src and of dst: equal, disjoint, or any sets, which may partly overlap."""
    pool = rng.sample(range(num_ranks), num_ranks)
    if rng.random() < 0.5:
        pool.sort()
    # Draw few ranks in most cases. The time grows with the square of the number of ranks, but more
    # ranks show no more kinds of faults.
    most = min(num_ranks, rng.choice([4, 6, 8, num_ranks]))
    num_src = rng.randint(1, most)
    relation = rng.choice(["same", "same", "disjoint", "any"])
    if relation == "same":
        return pool[:num_src], pool[:num_src]
    if relation == "disjoint" and num_src < num_ranks:
        rest = pool[num_src:]
        return pool[:num_src], rest[: rng.randint(1, min(most, len(rest)))]
    return pool[:num_src], rng.sample(pool, rng.randint(1, most))


def random_layout(
    rng: random.Random, shape: tuple[int, ...], ranks: list[int], dtype: str
) -> rv.Layout:
    """A layout with a random RVD, order and cuts; V is 1 if the dtype has no sum in numpy."""
    order = rng.sample(ranks, len(ranks)) if rng.random() < 0.4 else list(ranks)
    rvds = _rvds(len(order), len(shape))
    has_sum = dtype not in NOT_SUMMED and dtype not in STORED_AS
    rvd = rng.choice([rvd for rvd in rvds if has_sum or rvd.v == 1])
    return rv.Layout(shape, rvd, order, random_cuts(rng, shape, rvd))


@cache
def _rvds(num_ranks: int, num_dims: int) -> list[rv.RVD]:
    return all_rvds(num_ranks, num_dims)


def random_domains(rng: random.Random, ranks: list[int]) -> tuple[tuple[int, ...], ...]:
    """Random shared-memory domains: disjoint groups of some of the ranks, each ascending."""
    pool = rng.sample(ranks, rng.randint(0, len(ranks)))
    found = []
    while len(pool) > 1:
        size = rng.randint(2, len(pool))
        found.append(tuple(sorted(pool[:size])))
        pool = pool[size:]
    return tuple(found)
