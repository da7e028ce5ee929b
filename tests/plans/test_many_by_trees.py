"""Bundles whose tensors go along trees: right data, bounded staging, and agreement."""

from __future__ import annotations

import random

import pytest

import rvdcomm as rv
from rvdcomm.plans.bundle import Bundle, bundle_over
from rvdcomm.plans.by_trees import _with_forest
from rvdcomm.plans.many import plan_many
from rvdcomm.plans.many_by_trees import trees_of, with_trees_of
from rvdcomm.plans.member import Member
from rvdcomm.plans.tree_tensor import TreeTensor
from rvdcomm.program import Program, Transition, wire_dtype
from rvdcomm.synthesis import forests
from tests.covering import each_value
from tests.network.oracle import random_network, random_pair_on
from tests.oracle import local_faults
from tests.plans.test_bundle import run
from tests.plans.test_load import both_of, bytes_of

TORUS = rv.Network.preset("torus", 4, 4, link=rv.Link(1e-6, 1e9))
HOSTS = rv.Topology.hosts([range(4), range(4, 6)], rv.Link(1e-6, 1e11), rv.Link(1e-5, 1e9))
GATHER = "R(1)V(1)D({n},1)", "R({n})V(1)D(1,1)"
REDUCE = "R(1)V({n})D(1,1)", "R({n})V(1)D(1,1)"
DTYPES = {"same": ("int32", "int32"), "wider": ("int32", "int64"), "narrower": ("int64", "int32")}
NEAR = ("none", "half", "all")


def by_trees(seed: int, dtypes: tuple[str, str] = ("int32", "int32")) -> Bundle:
    """Some pairs on a random network, each along trees of any kind, each with some tensors."""
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(2, 8)))
    members = []
    while len(members) < 4:
        src, dst = random_pair_on(rng, network)
        transition = Transition(src, dst, *dtypes if src.rvd.v == 1 else ["int32"] * 2)
        found = [*forests(src, dst, network)]
        made = rv.plan(src, dst, wire_dtype(transition), network, executor="dist", trees=False)
        one = TreeTensor(transition, _with_forest(made, rng.choice(found)))
        members += [Member(f"{len(members)}.{i}", f"{len(members)}.{i}", one) for i in range(2)]
    levels = network.levels or network.nearest_levels
    return Bundle(tuple(members), levels, network=None if network.levels else network)


def over(bundle: Bundle, near: str) -> Bundle:
    """The bundle where no ranks, half of them, or all read each other's memory."""
    count = {"none": 0, "half": len(bundle.ranks) // 2, "all": len(bundle.ranks)}[near]
    return bundle_over(bundle, (bundle.ranks[:count],))


@pytest.fixture(params=[1 << 20, 0], ids=["joined", "apart"])
def join_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvdcomm.plans.member.JOIN_BYTES", request.param)


@pytest.mark.usefixtures("join_bytes")
@each_value(seed=range(6), near=NEAR, dtypes=DTYPES)
def test_every_tensor_arrives_and_programs_verify(seed: int, near: str, dtypes: str) -> None:
    bundle = over(by_trees(seed, DTYPES[dtypes]), near)
    assert run(bundle)[0] == []
    bundle.verify()


@pytest.mark.usefixtures("join_bytes")
@each_value(seed=range(6), near=NEAR, bucket_bytes=[32 << 20, 1 << 10])
def test_program_of_a_rank_is_its_part_of_the_whole(
    seed: int, near: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fill.BATCH_BYTES", "bundle.BUCKET_BYTES", "bundle.NEAR_BUCKET_BYTES"):
        monkeypatch.setattr(f"rvdcomm.plans.{name}", bucket_bytes)
    bundle = over(by_trees(seed), near)
    assert run(bundle)[0] == []
    for i, whole in enumerate(bundle.programs):
        assert local_faults(whole, lambda rank, i=i: bundle.program_of(rank)[i]) == []


@pytest.mark.usefixtures("join_bytes")
@each_value(seed=range(6), near=NEAR, num_slices=[1, 2, 8])
def test_a_lane_never_stages_more_than_its_bound(seed: int, near: str, num_slices: int) -> None:
    bundle = over(by_trees(seed), near)
    for one in {member.tensor_plan for member in bundle.members}:
        found = one.lanes(num_slices, bundle.topology, ranks=None, domains=bundle.domains)
        bound = one.staging_bound(num_slices)
        assert len(found.lanes) == one.num_lanes(num_slices)
        for lane in found.lanes:
            assert len(lane) <= one.num_phases
            instructions = tuple(each for phase in lane for each in phase)
            program = Program((found.transition,), found.dtype, found.buffers, instructions)
            for rank in program.ranks:
                assert program.arena(rank).num_bytes <= bound.get(rank, 0)


@pytest.mark.parametrize("seed", range(6))
def test_modelled_bytes_of_every_step_are_counted_bytes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modelled, counted = both_of(by_trees(seed), monkeypatch)
    assert list(map(bytes_of, modelled)) == list(map(bytes_of, counted))


def planned(
    links: rv.Topology | rv.Network, pair: tuple[str, str], num: int = 8, **options: object
) -> Bundle:
    n = len(links.ranks)
    src, dst = (rv.Layout((96, 1024), rvd.format(n=n), links.ranks) for rvd in pair)
    names = [f"w{i}" for i in range(num)]
    layouts = dict.fromkeys(names, src), dict.fromkeys(names, dst)
    return plan_many(*layouts, "float32", topology=links, executor="dist", **options)


@pytest.mark.parametrize("links, pair", [(TORUS, GATHER), (TORUS, REDUCE), (HOSTS, REDUCE)])
def test_trees_are_taken_where_they_are_faster(
    links: rv.Topology | rv.Network, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = planned(links, pair)
    assert all(isinstance(member.tensor_plan, TreeTensor) for member in bundle.members)
    bundle.verify()
    monkeypatch.setattr("rvdcomm.plans.many_by_trees._may_go", lambda one: False)
    paths = planned(links, pair)
    assert not any(isinstance(member.tensor_plan, TreeTensor) for member in paths.members)
    assert bundle.cost.secs < paths.cost.secs


def test_sums_that_change_their_dtype_go_along_paths() -> None:
    bundle = planned(TORUS, REDUCE, dst_dtype="float64")
    assert not any(isinstance(member.tensor_plan, TreeTensor) for member in bundle.members)


@pytest.mark.parametrize("extra", [128 << 10, 512 << 10])
def test_bundles_keep_to_a_memory_limit(extra: int) -> None:
    free = planned(HOSTS, REDUCE, 2)
    limit = max(map(free.shard_bytes, free.ranks)) + extra
    assert free.peak_bytes > limit
    lean = planned(HOSTS, REDUCE, 2, memory_limit=limit)
    assert lean.peak_bytes <= limit
    lean.verify()


def test_ranks_take_the_trees_of_the_first_one() -> None:
    ring = rv.Network.preset("ring", 6, link=rv.Link(1e-6, 1e9))
    bundle = planned(ring, REDUCE)
    ways = trees_of(bundle)
    assert ways is not None
    assert with_trees_of(bundle, ways).identity == bundle.identity
    none = with_trees_of(bundle, [None])
    assert not any(isinstance(member.tensor_plan, TreeTensor) for member in none.members)
    back = with_trees_of(none, ways)
    assert back.identity == bundle.identity
    with pytest.raises(rv.LayoutError, match="trees of another rank are for 2 pairs, not 1"):
        with_trees_of(bundle, [None, None])
    with pytest.raises(rv.LayoutError, match="cannot be read"):
        with_trees_of(bundle, [{"pace": "together", "ways": []}])


def test_on_levels_all_machines_find_the_same_trees() -> None:
    assert trees_of(planned(HOSTS, REDUCE)) is None


@pytest.mark.parametrize("size, num", [(65536, 60), (4096, 200)])
def test_trees_are_not_taken_where_they_are_slower(
    size: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = (rv.Layout((size,), x) for x in ("R(1)V(8)D(1)", "R(8)V(1)D(1)"))
    layouts = ({f"w{i}": one for i in range(num)} for one in (src, dst))
    request = (*layouts, "float32")
    options = {"topology": rv.Network.preset("dgx-1"), "executor": "dist"}
    bundle = plan_many(*request, **options)
    monkeypatch.setattr("rvdcomm.plans.many_by_trees._may_go", lambda one: False)
    assert bundle.cost.secs <= plan_many(*request, **options).cost.secs


def test_trees_are_taken_where_paths_exceed_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(bundle: Bundle) -> Bundle:
        if not any(isinstance(member.tensor_plan, TreeTensor) for member in bundle.members):
            raise rv.MemoryLimitError("paths do not fit")
        return bundle

    monkeypatch.setattr("rvdcomm.plans.many_by_trees.fitting", fitting)
    bundle = planned(HOSTS, REDUCE, 2)
    assert all(isinstance(member.tensor_plan, TreeTensor) for member in bundle.members)
