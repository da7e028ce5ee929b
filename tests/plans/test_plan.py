"""Laws of plans: right data and exact costs on every pair, volumes at the bound, memory limits."""

from __future__ import annotations

import random
import re
from functools import cache

import numpy as np
import pytest

import rvdcomm as rv
from tests.covering import each_value
from tests.oracle import (
    all_layouts,
    all_pairs,
    drawn,
    plan_faults,
    random_pair,
    random_topology,
    shards_of,
    sweep,
)

# --- right everywhere ---------------------------------------------------------------------------

# Sizes that every count divides are planned by search, awkward ones mostly by exchange.
WORLDS = [
    (num_ranks, shape)
    for num_ranks, shapes in {
        2: [(14,), (7,), (6, 10), (5, 7)],
        3: [(15,), (7,), (6, 9), (5, 7)],
        4: [(12,), (14,), (8, 12), (6, 10)],
        6: [(12,), (14,), (12, 18), (6, 10), (7, 5)],
        8: [(24,), (14,), (16, 24), (6, 10)],
        12: [(24,), (14,)],
    }.items()
    for shape in shapes
]
LARGE_WORLDS = [(8, (8, 16, 24)), (8, (6, 10, 14)), (12, (12, 24)), (12, (14, 10))]


@pytest.mark.many(8)
@pytest.mark.parametrize("num_ranks, shape", WORLDS)
def test_plans_of_every_pair_give_right_data_and_exact_costs(
    num_ranks: int, shape: tuple[int, ...]
) -> None:
    assert sweep(all_pairs(shape, num_ranks)) == []


@pytest.mark.many(3)
@pytest.mark.parametrize("num_ranks, shape", LARGE_WORLDS)
@pytest.mark.parametrize("half", ["first", "second"])
def test_plans_of_drawn_pairs_of_large_worlds_give_right_data_and_exact_costs(
    num_ranks: int, shape: tuple[int, ...], half: str
) -> None:
    # Drawn from 1225 pairs of 8 ranks and 1600 of 12; two tests, so that they can run in parallel.
    assert sweep(drawn(all_pairs(shape, num_ranks), 0.125, half)) == []


TWO_LEVELS = [
    ("2x2", [[0, 1], [2, 3]], (8, 12)),
    ("interleaved", [[0, 2], [1, 3]], (6, 10)),
    ("1+3", [[0], [1, 2, 3]], (8, 12)),
    ("2x3", [[0, 1, 2], [3, 4, 5]], (12, 18)),
    ("3x2", [[0, 1], [2, 3], [4, 5]], (6, 10)),
    ("2x4", [[0, 1, 2, 3], [4, 5, 6, 7]], (16, 24)),
    ("2x4 ragged", [[0, 1, 2, 3], [4, 5, 6, 7]], (6, 10)),
    ("5+3", [[0, 1, 2, 3, 4], [5, 6, 7]], (16, 24)),
]


@pytest.mark.many(4)
@pytest.mark.parametrize(
    "hosts, shape", [row[1:] for row in TWO_LEVELS], ids=[row[0] for row in TWO_LEVELS]
)
def test_plans_over_hosts_give_right_data_and_exact_costs(
    hosts: list[list[int]], shape: tuple[int, ...]
) -> None:
    topology = rv.Topology.hosts(hosts, rv.Link(1e-6, 1e9), rv.Link(1e-5, 1.25e8))
    assert sweep(all_pairs(shape, len(topology.ranks)), topology) == []


@pytest.mark.many(4)
@pytest.mark.parametrize("seed", range(8))
def test_plans_of_random_pairs_give_right_data_and_exact_costs(seed: int) -> None:
    rng = random.Random(seed)
    found = []
    for _ in range(84):
        pair, topology = random_pair(rng), random_topology(rng)
        found += [f"{fault} on {topology.levels}" for fault in sweep([pair], topology)]
    assert found == []


@each_value(num_ranks=[16, 24, 32, 48, 64], hosted=[False, True])
def test_plans_of_16_to_64_ranks_give_right_data_and_exact_costs(
    num_ranks: int, hosted: bool
) -> None:
    rng = random.Random(num_ranks)
    layouts = all_layouts((96, 128), num_ranks)
    pairs = [(rng.choice(layouts), rng.choice(layouts)) for _ in range(6)]
    hosts = [range(h, h + 8) for h in range(0, num_ranks, 8)] if hosted else [range(num_ranks)]
    topology = rv.Topology.hosts(hosts, rv.Link(1e-6, 1e9), rv.Link(1e-5, 1e8))
    assert sweep(pairs, topology) == []


@pytest.mark.parametrize(
    "dtype, src_v",
    [("bool", 1), ("uint8", 3), ("int8", 3), ("uint16", 3), ("float16", 3), ("complex128", 3)],
)
def test_plans_of_several_dtypes_give_right_data_and_exact_costs(dtype: str, src_v: int) -> None:
    src = rv.Layout((6, 10), rv.RVD(6 // src_v, src_v, (1, 1)))
    dst = rv.Layout((6, 10), "R(1)V(1)D(3,2)", ranks=[5, 0, 4, 1, 3, 2])
    assert plan_faults(rv.plan(src, dst, dtype)) == []


# --- at the bound -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 24), (8, 16, 24), (6, 10), (6, 10, 14)])
def test_busiest_rank_receives_the_bound_if_nothing_is_summed(shape: tuple[int, ...]) -> None:
    topology = rv.Topology.single_host(8, alpha_secs=0, bytes_per_sec=1.0)
    layouts = [layout for layout in all_layouts(shape, 8) if layout.rvd.v == 1]
    above = []
    for src in layouts:
        for dst in layouts:
            plan = rv.plan(src, dst, topology=topology)
            if plan.cost.recv_bytes != plan.bound.recv_bytes:
                above.append(
                    f"{src.rvd} -> {dst.rvd}: {plan.cost.recv_bytes}, bound {plan.bound.recv_bytes}"
                )
    assert above == []


@pytest.mark.parametrize(
    "src, dst, tensors",
    [
        ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", 1.5),
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", 3 / 16),
        ("R(1)V(1)D(1,8)", "R(1)V(1)D(2,4)", 1 / 8),
        ("R(2)V(4)D(1,1)", "R(8)V(1)D(1,1)", 1.25),
        ("R(2)V(4)D(1,1)", "R(2)V(1)D(4,1)", 0.5),
    ],
)
def test_busiest_rank_receives_the_documented_volume_for_known_pairs(
    src: str, dst: str, tensors: float
) -> None:
    # Source: docs/bound.md; in units of the whole tensor, received by the busiest rank.
    shape = (16, 24)
    topology = rv.Topology.single_host(8, alpha_secs=0, bytes_per_sec=1.0)
    plan = rv.plan(rv.Layout(shape, src), rv.Layout(shape, dst), topology=topology)
    assert plan.cost.recv_bytes == tensors * 16 * 24 * 4


# --- memory -------------------------------------------------------------------------------------

SQUEEZED = {
    "gather": ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", range(4)),
    "all to all": ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", range(4)),
    "sum": ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", range(4)),
    "sum and scatter": ("R(1)V(4)D(1,1)", "R(1)V(1)D(1,4)", range(4)),
    "parts kept": ("R(1)V(4)D(1,1)", "R(2)V(2)D(1,1)", range(4)),
    "to other ranks": ("R(1)V(2)D(1,2)", "R(1)V(1)D(3,2)", [9, 4, 3, 8, 2, 5]),
    "to replicas elsewhere": ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", [4, 5, 6, 7]),
}


def squeezed(name: str) -> tuple[rv.Layout, rv.Layout]:
    src, dst, ranks = SQUEEZED[name]
    return rv.Layout((60, 34), src), rv.Layout((60, 34), dst, ranks=ranks)


@cache
def least_memory(name: str) -> int:
    """The number that the error names."""
    with pytest.raises(rv.MemoryLimitError) as raised:
        rv.plan(*squeezed(name), "int64", memory_limit=1)
    found = re.search(r"the least that a plan needs is (\d+)", str(raised.value))
    assert found is not None
    return int(found[1])


@each_value(name=[*SQUEEZED, "gather", "sum", "parts kept"], share=[0, 0.5, 1])
def test_memory_limit_is_respected_down_to_the_least_memory(name: str, share: float) -> None:
    src, dst = squeezed(name)
    least, free = least_memory(name), rv.plan(src, dst, "int64").cost.peak_bytes
    limit = least + int((free - least) * share)
    assert rv.plan(src, dst, "int64", memory_limit=limit).cost.peak_bytes <= limit


@pytest.mark.parametrize("name", SQUEEZED)
def test_plan_of_least_memory_gives_right_data_and_exact_costs(name: str) -> None:
    plan = rv.plan(*squeezed(name), "int64", memory_limit=least_memory(name))
    assert plan_faults(plan) == []


@pytest.mark.parametrize("name", SQUEEZED)
def test_limit_one_byte_below_the_least_memory_raises_memory_limit_error(name: str) -> None:
    least = least_memory(name)
    with pytest.raises(rv.MemoryLimitError, match=f"least that a plan needs is {least};"):
        rv.plan(*squeezed(name), "int64", memory_limit=least - 1)


def test_memory_limit_at_the_unlimited_peak_keeps_the_path() -> None:
    src, dst = squeezed("sum and scatter")
    free = rv.plan(src, dst)
    assert rv.plan(src, dst, memory_limit=free.cost.peak_bytes).path == free.path


def test_memory_error_names_the_transition_the_limit_and_the_shards() -> None:
    src, dst = squeezed("gather")
    message = (
        r"R\(1\)V\(1\)D\(4,1\) -> R\(4\)V\(1\)D\(1,1\) of shape \(60, 34\) float32: "
        r"memory_limit=100 bytes a rank, but the least that a plan needs is \d+; "
        r"the src and dst shards alone are 10200\."
    )
    with pytest.raises(rv.MemoryLimitError, match=message):
        rv.plan(src, dst, memory_limit=100)


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_random_pairs_respect_a_memory_limit_if_they_exist(seed: int) -> None:
    rng = random.Random(seed)
    found = []
    for _ in range(25):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        free = rv.plan(src, dst, "int64", topology)
        limit = (free.cost.peak_bytes + free.bound.peak_bytes) // 2
        try:
            plan = rv.plan(src, dst, "int64", topology, limit)
        except rv.MemoryLimitError:
            continue
        faults = plan_faults(plan)
        if plan.cost.peak_bytes > limit:
            faults.append(f"peak {plan.cost.peak_bytes} is above {limit}")
        found += [f"{src} -> {dst}: {fault}" for fault in faults]
    assert found == []


# --- identity -----------------------------------------------------------------------------------


def gathered(**changes: object) -> rv.Plan:
    arguments = {
        "src": rv.Layout((6, 10), "R(1)V(1)D(2,1)"),
        "dst": rv.Layout((6, 10), "R(2)V(1)D(1,1)"),
        "dtype": "float32",
        "topology": rv.Topology.single_host(2, 1e-6, 1e9),
        "memory_limit": None,
    }
    return rv.plan(**(arguments | changes))


def test_equal_layouts_of_different_spelling_give_the_same_plan() -> None:
    respelled = rv.Layout((6, 10), "R(2)V(1)D(1,1)", ranks=[1, 0], cuts=[[0, 6], [0, 10]])
    assert gathered(dst=respelled) is gathered()


@pytest.mark.parametrize("dtype", ["float32", "torch.float32", np.float32, np.dtype("float32")])
def test_equal_dtypes_of_different_spelling_give_the_same_plan(dtype: object) -> None:
    assert gathered(dtype=dtype) is gathered()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int32"},
        {"memory_limit": 10**9},
        {"topology": None},
        {"topology": rv.Topology.single_host(3, 1e-6, 1e9)},
        {"topology": rv.Topology.single_host(2, 2e-6, 1e9)},
        {"topology": rv.Topology.hosts([[0], [1]], rv.Link(1e-6, 1e9), rv.Link(1e-6, 1e9))},
        {"src": rv.Layout((6, 10), "R(1)V(1)D(2,1)", ranks=[1, 0])},
        {"src": rv.Layout((6, 10), "R(1)V(1)D(2,1)", cuts=[[0, 2, 6], [0, 10]])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_different_arguments_give_different_plans(changes: dict[str, object]) -> None:
    assert gathered(**changes) is not gathered()


# --- print --------------------------------------------------------------------------------------


def test_plan_prints_its_steps_cost_bound_and_gap() -> None:
    src, dst = rv.Layout((1024, 1024), "R(2)V(4)D(1,1)"), rv.Layout((1024, 1024), "R(8)V(1)D(1,1)")
    topology = rv.Topology.single_host(8, alpha_secs=0, bytes_per_sec=1024**3)
    # By messages, because ranks that read each other's memory do both gathers in one step.
    plan = rv.plan(src, dst, topology=topology, executor="dist")
    assert str(plan).splitlines() == [
        "R(2)V(4)D(1,1) -> R(8)V(1)D(1,1)  1024x1024 float32",
        "step  primitive   groups   layout                     cost",
        "                           R(2)V(4)D(1,1) on 0:8",
        "0     exchange    (0:8)    R(1)V(1)D(1,1)F(8) on 0:8  12 MiB, 1.465 ms",
        "1     all_gather  4x(0,4)  R(2)V(1)D(1,1)F(4) on 0:8  4 MiB, 488.3 us",
        "2     all_gather  2x(0:4)  R(8)V(1)D(1,1) on 0:8      24 MiB, 2.93 ms",
        "cost   4.883 ms, 40 MiB on the wire (0 B between hosts), busiest rank receives 5 MiB",
        "bound  4.883 ms, 40 MiB on the wire (0 B between hosts), busiest rank receives 5 MiB",
        "gap    1x   rounds 7   peak memory 11 MiB a rank (src and dst shards: 8 MiB)",
    ]


# --- bad input ----------------------------------------------------------------------------------

GATHER = (rv.Layout((6, 10), "R(1)V(1)D(2,1)"), rv.Layout((6, 10), "R(2)V(1)D(1,1)"))


@pytest.mark.parametrize("dtype", ["bool", "float8_e8m0fnu"])
def test_plan_rejects_parts_of_dtypes_without_a_sum(dtype: str) -> None:
    parts = rv.Layout((6, 10), "R(1)V(2)D(1,1)")
    message = rf"R\(1\)V\(2\)D\(1,1\) has V\(2\), but {dtype} values cannot be summed"
    with pytest.raises(rv.LayoutError, match=message):
        rv.plan(parts, GATHER[1], dtype)


@pytest.mark.parametrize(
    "src, dst, dtype, message",
    [
        (
            GATHER[0],
            rv.Layout((10, 6), "R(2)V(1)D(1,1)"),
            None,
            r"shape: \(6, 10\) and \(10, 6\)\.",
        ),
        (GATHER[1], rv.Layout((6, 10), "R(1)V(2)D(1,1)"), "bool", "bool values cannot be summed"),
        (*GATHER, "float24", "dtype 'float24' is unknown; the known ones are bool"),
        (
            GATHER[0],
            rv.Layout((6, 10), "R(2)V(1)D(1,1)", ranks=[1, 7]),
            None,
            r"ranks \[7\] are not in the topology, which has \[0, 1\]\.",
        ),
    ],
    ids=["shapes", "parts of bool in dst", "dtype", "ranks outside the topology"],
)
def test_plan_rejects_layouts_and_dtypes_that_do_not_fit(
    src: rv.Layout, dst: rv.Layout, dtype: str | None, message: str
) -> None:
    topology = rv.Topology.single_host(2, 0, 1e9)
    with pytest.raises(rv.LayoutError, match=message):
        rv.plan(src, dst, dtype or "float32", topology)


def test_simulated_results_of_equal_plans_share_no_memory() -> None:
    plan = rv.plan(*GATHER)
    shards = shards_of(GATHER[0], [np.ones((6, 10), np.float32)])
    first = rv.simulate(plan, shards).shards[0]
    first[:] = 7
    assert (rv.simulate(plan, shards).shards[0] == 1).all()
