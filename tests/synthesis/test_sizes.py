"""Forests of other sizes: a pair of layouts in another shape is not searched for again."""

import pickle

import pytest

import rvdcomm as rv
from rvdcomm.cost import flow_bound
from rvdcomm.synthesis import beats_of, forests, search

NEAR, FAR = rv.Link(3e-6, 300e9), rv.Link(100e-6, 10e9)
LINKS = {
    "hosts": rv.Topology.hosts([range(4), range(4, 6)], NEAR, FAR),
    "ring": rv.Network.preset("ring", 6, link=rv.Link(1e-6, 1e9)),
}
SIZES = {"even": (6 << 12, 6 * 4099), "uneven": (3_000_001, 7_000_002)}


def pair_of(size: int) -> tuple[rv.Layout, rv.Layout]:
    src, dst = (rv.Layout((size,), rvd, range(6)) for rvd in ("R(1)V(2)D(3)", "R(6)V(1)D(1)"))
    return src, dst


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("links", LINKS)
def test_another_shape_has_the_same_trees_without_a_search(
    links: str, sizes: tuple[int, int]
) -> None:
    network = rv.Network.of(LINKS[links])
    first = [*forests(*pair_of(sizes[0]), network)]

    misses = search._made.cache_info().misses
    again = [*forests(*pair_of(sizes[1]), network)]
    assert search._made.cache_info().misses == misses
    assert [set(f.trees) for f in first] == [set(f.trees) for f in again]
    bound = flow_bound(*pair_of(sizes[1]), 1, network).secs
    for forest in again:
        assert not forest.faults()
        assert forest.least_secs <= forest.secs * (1 + 1e-9)
        assert bound <= forest.secs * (1 + 1e-9)
        # The time of the pattern is that of this size, up to its units.
        secs = beats_of(forest).secs(4, 4)
        alone = forest.with_ways(forest.to_json())
        assert secs == pytest.approx(beats_of(alone).secs(4, 4), rel=2e-3)


def test_hashes_of_forests_do_not_travel() -> None:
    forest = next(forests(*pair_of(600), rv.Network.of(LINKS["hosts"])))
    assert hash(forest) == hash(forest)
    again = pickle.loads(pickle.dumps(forest))
    assert again == forest
    assert again.pattern == forest.pattern
    assert "_hash" not in again.__dict__


@pytest.mark.parametrize("links", LINKS)
def test_plans_of_uneven_shapes_verify_and_do_not_beat_the_bound(links: str) -> None:
    rv.plan(*pair_of(3_000_001), "float32", LINKS[links], executor="dist")
    for size in (7_000_002, 5_000_003):
        made = rv.plan(*pair_of(size), "float32", LINKS[links], executor="dist")
        assert made.forest is not None
        made.verify()
        assert made.cost.secs >= made.bound.secs * (1 - 1e-9)
