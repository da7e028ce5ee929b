"""Demands in units: equal layouts in other shapes give equal demands, which are never larger."""

import pytest

from rvdcomm import Layout
from rvdcomm.cost import demands_of, in_units
from rvdcomm.cost.demands import MAX_UNITS

GATHER = "R(1)V(1)D(6)", "R(6)V(1)D(1)"


def units_of(size: int) -> tuple[object, ...]:
    src, dst = (Layout((size,), rvd, range(6)) for rvd in GATHER)
    return in_units(demands_of(src, dst))[1]


def test_shapes_whose_shards_differ_by_few_elements_have_equal_demands() -> None:
    found = [units_of(size) for size in (600_000, 600_001, 1_310_720, 1_310_723)]
    assert {tuple(sorted(d.num_elements for d in each)) for each in found[1:]} == {(MAX_UNITS,) * 6}
    assert found[1] == found[2] == found[3]


def test_small_sizes_and_multiples_of_them_stay_exact() -> None:
    assert sorted(d.num_elements for d in units_of(9)) == [1, 2, 2, 2, 2]
    assert [d.num_elements for d in units_of(600)] == [1] * 6


@pytest.mark.parametrize("size", [6, 7, 599, 600, 600_001, 9_999_991])
def test_units_are_near_the_sizes_and_named_by_their_places(size: int) -> None:
    src, dst = (Layout((size,), rvd, range(6)) for rvd in GATHER)
    demands = demands_of(src, dst)
    unit, alike, order = in_units(demands)
    assert sorted(order) == list(range(len(demands)))
    for found, place in zip(alike, order, strict=True):
        whole = demands[place]
        assert (found.parts, found.readers) == (whole.parts, whole.readers)
        assert abs(found.num_elements * unit - whole.num_elements) <= unit / 2
        assert found.num_elements >= 1


def test_a_tiny_shard_beside_large_ones_is_a_unit() -> None:
    found = []
    for rows in (9000, 9001):
        cuts = ([rows * i for i in range(8)] + [rows * 7 + 1],)
        size = rows * 7 + 1
        src, dst = (
            Layout((size,), "R(1)V(1)D(8)", range(8), cuts=cuts),
            Layout((size,), "R(8)V(1)D(1)", range(8)),
        )
        found.append(in_units(demands_of(src, dst))[1])
    assert found[0] == found[1]
    assert sorted(d.num_elements for d in found[0]) == [1] + [MAX_UNITS] * 7
