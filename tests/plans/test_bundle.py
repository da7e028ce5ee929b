"""Laws of bundles: one call moves many tensors correctly, in fewer collectives than many calls."""

from __future__ import annotations

import random
import re
from itertools import product

import numpy as np
import pytest

import rvdcomm as rv
from bench.weights.models import sides
from rvdcomm.plans.bundle import BUCKET_BYTES, Bundle, bundle_over
from rvdcomm.plans.many import matched, plan_many
from rvdcomm.program import Program, lanes
from tests.covering import each_value
from tests.oracle import (
    data_faults,
    local_faults,
    parts_of,
    random_layout,
    random_shape,
    shards_of,
    simulate_many,
)

ISLANDS = {"none": (), "one": (range(12),), "two": (range(5), range(5, 12))}
SEEDS = range(6)

seeds = pytest.mark.parametrize("seed", SEEDS)
domains = each_value(seed=range(12), near=ISLANDS)


def random_bundle(seed: int, **options: object) -> Bundle:
    """Some kinds of tensors of unequal dims, each kind a few times, over up to 12 ranks."""
    rng = random.Random(seed)
    src, dst = {}, {}
    for kind in range(rng.randint(1, 4)):
        shape = rng.choice([random_shape(rng), (12, 24), (24,), (8, 6, 4), ()])
        a, b = (
            random_layout(rng, shape, rng.sample(range(12), rng.choice([1, 2, 3, 4, 6, 12])))
            for _ in range(2)
        )
        for i in range(rng.randint(1, 3)):
            src[f"{kind}.{i}"], dst[f"{kind}.{i}"] = a, b
    options = {"topology": random_topology_of_12(rng), **options}
    return plan_many(src, dst, "int32", **options)


def random_topology_of_12(rng: random.Random) -> rv.Topology | None:
    hosts = [range(5), range(5, 12)]
    near, far = rv.Link(1e-6, 4e9), rv.Link(1e-5, 1e9)
    return rng.choice([None, rv.Topology.hosts(hosts, near, far)])


def over(bundle: Bundle, near: str) -> Bundle:
    """The bundle where these ranks read each other's memory."""
    return bundle_over(bundle, tuple(map(tuple, ISLANDS[near])))


def run(bundle: Bundle) -> tuple[list[str], int]:
    """The faults of a simulated run of all batches, and the bytes that it sends."""
    faults, wire_bytes = [], 0
    for batch, program in zip(bundle.batches, bundle.programs, strict=True):
        members = [bundle.members[i] for i in batch.members]
        many = len(members) > 1
        shards, parts = {}, []
        for i, member in enumerate(members):
            transition = member.transition
            parts.append(parts_of(transition.src, transition.src_dtype, seed=i))
            for rank, shard in shards_of(transition.src, parts[i]).items():
                shards[f"src{i}" if many else "src", rank] = shard
        before = {home: shard.copy() for home, shard in shards.items()}
        results, counted = simulate_many(program, shards)
        assert all(np.array_equal(before[home], shards[home]) for home in shards)
        wire_bytes += counted.wire_bytes
        for i, member in enumerate(members):
            name = f"dst{i}" if many else "dst"
            dst = member.transition.dst
            got = {rank: results[name, rank] for rank in dst.ranks}
            assert {shard.dtype.name for shard in got.values()} == {member.transition.dst_dtype}
            faults += data_faults(dst, got, parts[i])
    return faults, wire_bytes


JOINED = [1 << 20, 64, 0]
"""Largest messages of tensors that share collectives: all, some or none of the tensors."""


@each_value(seed=range(12), near=ISLANDS, join_bytes=JOINED)
def test_bundle_moves_every_tensor_correctly_and_verifies(
    seed: int, near: str, join_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rvdcomm.plans.member.JOIN_BYTES", join_bytes)
    bundle = over(random_bundle(seed), near)
    assert run(bundle)[0] == []
    bundle.verify()


@each_value(seed=range(12), near=ISLANDS, limits=[(32 << 20, 1 << 20), (16 << 10, 64)])
def test_program_lowered_for_one_rank_equals_its_part_of_the_whole_program(
    seed: int, near: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket_bytes, join_bytes = limits
    monkeypatch.setattr("rvdcomm.plans.member.JOIN_BYTES", join_bytes)
    for name in ("fill.BATCH_BYTES", "bundle.BUCKET_BYTES", "bundle.NEAR_BUCKET_BYTES"):
        monkeypatch.setattr(f"rvdcomm.plans.{name}", bucket_bytes)
    bundle = over(random_bundle(seed), near)
    for i, whole in enumerate(bundle.programs):
        assert local_faults(whole, lambda rank, i=i: bundle.program_of(rank)[i]) == []


@seeds
def test_a_lane_never_stages_more_than_its_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    for near, num_slices, join_bytes in product(ISLANDS.values(), (1, 2, 8), (0, 1 << 20)):
        monkeypatch.setattr("rvdcomm.plans.member.JOIN_BYTES", join_bytes)
        bundle = random_bundle(rng.randrange(10**6))
        for member in bundle.members:
            found = member.tensor_plan.lanes(num_slices, bundle.topology, ranks=None, domains=near)
            bound = member.tensor_plan.staging_bound(num_slices)
            assert len(found.lanes) == member.tensor_plan.num_lanes(num_slices)
            for lane in found.lanes:
                assert len(lane) <= member.tensor_plan.num_phases
                instructions = tuple(one for phase in lane for one in phase)
                program = Program((found.transition,), found.dtype, found.buffers, instructions)
                for rank in program.ranks:
                    assert program.arena(rank).num_bytes <= bound.get(rank, 0)


@seeds
def test_parse_undoes_str_of_programs_of_bundles(seed: int) -> None:
    for program in random_bundle(seed).programs:
        assert Program.parse(str(program)) == program


@seeds
def test_a_bundle_sends_the_bytes_that_its_plans_send(seed: int) -> None:
    bundle = random_bundle(seed, executor="dist")
    alone = sum(member.plan.cost.wire_bytes for member in bundle.members)
    assert run(bundle)[1] == bundle.cost.wire_bytes == alone


@domains
def test_peak_bytes_of_a_bundle_stay_below_the_memory_limit(seed: int, near: str) -> None:
    free = over(random_bundle(seed, executor="dist"), near)
    shards = max(map(free.shard_bytes, free.ranks))
    limit = shards + max(1024, free.staging_bytes // 2)
    bundle = over(random_bundle(seed, executor="dist", memory_limit=limit), near)
    assert bundle.peak_bytes <= limit
    assert bundle.cost.peak_bytes == bundle.peak_bytes
    assert run(bundle)[0] == []


@domains
def test_peak_bytes_are_the_largest_sum_of_shards_and_staging_of_a_rank(
    seed: int, near: str
) -> None:
    bundle = over(random_bundle(seed), near)
    programs = bundle.programs
    assert bundle.peak_bytes == max(
        sum(program.shard_bytes(rank) for program in programs if rank in program.ranks)
        + max(program.arena(rank).num_bytes for program in programs)
        for rank in bundle.ranks
    )


@pytest.mark.parametrize("executor", ["auto", "dist"])
@pytest.mark.parametrize("mebibytes", [2, 8, 32])
def test_bundle_of_a_model_stays_below_the_memory_limit(executor: str, mebibytes: int) -> None:
    # The bound assumes no holes between buffers, but an arena may have some.
    src, dst = sides("7b", 16, range(4), range(4, 8), 1, 4)
    link = rv.Link(1e-5, 1e9)
    options = {"topology": rv.Topology.hosts([range(4), range(4, 8)], link, link)}
    free = plan_many(src, dst, "bfloat16", **options)
    limit = max(map(free.shard_bytes, free.ranks)) + (mebibytes << 20)
    bundle = plan_many(src, dst, "bfloat16", **options, executor=executor, memory_limit=limit)
    assert bundle.peak_bytes <= limit


def test_infeasible_memory_limit_raises_error_with_the_least_feasible_limit() -> None:
    src, dst = rv.Layout((64, 64), "R(1)V(1)D(4,1)"), rv.Layout((64, 64), "R(1)V(1)D(1,4)")
    message = r"memory_limit=\d+ bytes per rank, .* least .* is (\d+); .* shards alone are 8192"
    with pytest.raises(rv.MemoryLimitError, match=message) as raised:
        plan_many({"w": src}, {"w": dst}, "float32", memory_limit=16)
    least = int(re.search(message, str(raised.value))[1])
    found = plan_many({"w": src}, {"w": dst}, "float32", memory_limit=least)
    assert found.peak_bytes == least
    with pytest.raises(rv.MemoryLimitError, match=message):
        plan_many({"w": src}, {"w": dst}, "float32", memory_limit=least - 1)


def test_auto_executor_fits_the_lower_peak_of_peer_and_dist() -> None:
    src, dst = rv.Layout((64, 64), "R(1)V(1)D(4,1)"), rv.Layout((64, 64), "R(4)V(1)D(1,1)")
    request = {"w": src}, {"w": dst}, "float32"
    near, far = (plan_many(*request, executor=name) for name in ("peer", "dist"))
    assert near.domains
    assert near.peak_bytes != far.peak_bytes
    limit = min(near.peak_bytes, far.peak_bytes)
    assert plan_many(*request, memory_limit=limit).peak_bytes <= limit


@pytest.mark.parametrize("src, dst", [("D(4,1)", "D(1,4)"), ("D(1,4)", "D(4,1)")])
@pytest.mark.parametrize("num_tensors", [1, 2, 25])
def test_small_tensors_share_one_collective(src: str, dst: str, num_tensors: int) -> None:
    before = rv.Layout((16, 24), f"R(1)V(1){src}")
    after = rv.Layout((16, 24), f"R(1)V(1){dst}")
    names = [f"layer{i}" for i in range(num_tensors)]
    layouts = dict.fromkeys(names, before), dict.fromkeys(names, after)
    bundle = plan_many(*layouts, "float32", executor="dist")
    (program,) = bundle.programs
    assert len(program.collectives) == 1


def test_tensors_with_large_messages_have_separate_collectives() -> None:
    before, after = (rv.Layout((4096, 4096), f"R(1)V(1){d}") for d in ("D(4,1)", "D(1,4)"))
    bundle = plan_many(
        {"a": before, "b": before}, {"a": after, "b": after}, "float32", executor="dist"
    )
    (program,) = bundle.programs
    for one in program.collectives:
        assert len({e.box.lo[0] for m in one.messages for e in m.entries}) == 1
    assert bundle.staging_bytes <= 2 * BUCKET_BYTES


@each_value(
    seed=range(12),
    near=ISLANDS,
    dtypes=[("int32", "int64"), ("int64", "int32"), ("int16", "float64")],
)
def test_bundle_converts_values_to_the_dst_dtype(
    seed: int, near: str, dtypes: tuple[str, str]
) -> None:
    free = random_bundle(seed)
    src = {member.name: member.transition.src for member in free.members}
    dst = {member.name: member.transition.dst for member in free.members}
    bundle = plan_many(src, dst, dtypes[0], dst_dtype=dtypes[1], topology=free.topology)
    bundle = over(bundle, near)
    assert run(bundle)[0] == []
    bundle.verify()


def test_tensors_without_sums_are_sent_in_the_narrower_dtype() -> None:
    src, dst = rv.Layout((8, 8), "R(1)V(1)D(4,1)"), rv.Layout((8, 8), "R(1)V(1)D(1,4)")
    wide, narrow = (
        plan_many({"w": src}, {"w": dst}, a, dst_dtype=b).cost.wire_bytes
        for a, b in (("float32", "float32"), ("float32", "float16"))
    )
    widened = plan_many({"w": src}, {"w": dst}, "float16", dst_dtype="float32").cost.wire_bytes
    assert (narrow, widened) == (wide // 2, wide // 2)


def test_parts_are_summed_before_they_are_rounded() -> None:
    src, dst = rv.Layout((4,), "R(1)V(2)D(1)"), rv.Layout((4,), "R(2)V(1)D(1)")
    bundle = plan_many({"w": src}, {"w": dst}, "float32", dst_dtype="float16")
    (program,) = bundle.programs
    # float16 has no 2049: it would round to 2048 before 1 is added.
    parts = {("src", 0): np.full(4, 2049, np.float32), ("src", 1): np.ones(4, np.float32)}
    results, _ = simulate_many(program, parts)
    assert results["dst", 0].tolist() == results["dst", 1].tolist() == [2050.0] * 4


def test_bundle_of_large_converted_tensors_verifies() -> None:
    # Two transfers between hosts, whose results are gathered in place.
    cluster = rv.Topology.preset("dgx-h100", 2, 8)
    src = rv.Layout((4096, 1024), "R(2)V(1)D(4,1)", range(8))
    dst = rv.Layout((4096, 1024), "R(2)V(1)D(2,1)", range(8, 12))
    layouts = dict.fromkeys("ab", src), dict.fromkeys("ab", dst)
    bundle = plan_many(*layouts, "float32", dst_dtype="bfloat16", topology=cluster)
    assert not any(one.tensor_plan.is_small for one in bundle.members)
    bundle.verify()


def test_replicas_cross_the_slow_link_once() -> None:
    hosts = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(1e-6, 1e10), rv.Link(1e-5, 1e9))
    src = rv.Layout((64, 96), "R(2)V(1)D(2,1)", range(4))
    dst = rv.Layout((64, 96), "R(4)V(1)D(1,1)", range(4, 8))
    names = [f"w{i}" for i in range(6)]
    layouts = dict.fromkeys(names, src), dict.fromkeys(names, dst)
    bundle = plan_many(*layouts, "float32", topology=hosts)
    assert bundle.cost.host_bytes == 6 * 64 * 96 * 4


def test_both_pipeline_stages_send_in_the_first_half_of_the_program() -> None:
    stages = [rv.Layout((64, 64), "R(1)V(1)D(2,1)", ranks) for ranks in ((0, 1), (2, 3))]
    dst = rv.Layout((64, 64), "R(1)V(1)D(2,1)", (4, 5))
    src = {f"{i}": stages[i // 10] for i in range(20)}
    options = {"executor": "dist", "memory_limit": 288 << 10}
    bundle = plan_many(src, dict.fromkeys(src, dst), "float32", **options)
    (program,) = bundle.programs
    senders = [one.ranks[0] for one in program.collectives]
    first_half = senders[: len(senders) // 2]
    assert {0, 2} <= set(first_half)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst, names, message",
    [
        ("ab", "ac", None, r"src and dst differ in the names \['b', 'c'\]"),
        ("ab", "xb", str.upper, r"differ in the names \['A', 'B', 'b', 'x'\]"),
        ("ab", "x", lambda _: "x", r"names maps \['a', 'b'\] to one name, 'x'"),
        ("", "", None, "there is no tensor"),
    ],
)
def test_names_that_do_not_match_raise_layout_error(
    src: str, dst: str, names: object, message: str
) -> None:
    with pytest.raises(rv.LayoutError, match=message):
        matched(dict.fromkeys(src), dict.fromkeys(dst), names)  # type: ignore[arg-type]


def test_error_names_the_tensor_whose_layouts_differ_in_shape() -> None:
    src, dst = rv.Layout((4,), "R(1)V(1)D(2)"), rv.Layout((5,), "R(1)V(1)D(2)")
    with pytest.raises(rv.LayoutError, match=r"tensor 'w': .* differ in shape"):
        plan_many({"w": src}, {"w": dst}, "float32")


def test_printed_bundle_has_one_line_per_tensor_of_at_most_100_columns() -> None:
    bundle = random_bundle(3)
    lines = str(bundle).splitlines()
    assert len(lines) == 1 + len(bundle.members) + 3
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("tensor")


# --- large worlds -------------------------------------------------------------------------------


def test_large_bundle_is_planned_and_printed_without_lowering_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    src = rv.Layout((512, 512), "R(2)V(1)D(64,1)", range(128))
    dst = rv.Layout((512, 512), "R(64)V(1)D(1,2)", range(128, 256))
    names = [f"w{i}" for i in range(40)]
    layouts = dict.fromkeys(names, src), dict.fromkeys(names, dst)
    bundle = plan_many(*layouts, "bfloat16", topology=rv.Topology.preset("dgx-h100", 32, 8))
    lowered = []
    monkeypatch.setattr(
        "rvdcomm.plans.path_tensor.lanes",
        lambda *args, **options: lowered.append(options["ranks"]) or lanes(*args, **options),
    )
    assert "buckets, modelled" in str(bundle)
    assert bundle.cost.wire_bytes == 40 * bundle.members[0].plan.cost.wire_bytes
    assert lowered == []
    programs = bundle.program_of(130)
    assert lowered == [tuple(range(128, 136))]
    (program,) = programs
    assert program.peak_bytes(130) <= bundle.peak_bytes
