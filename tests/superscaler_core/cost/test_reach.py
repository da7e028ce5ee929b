"""Reach: the share of the peak speed, by the amount of work."""

from __future__ import annotations

from itertools import cycle, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import superscaler_core as ss
from superscaler_core.cost.presets import PROFILES
from superscaler_core.cost.reach import FULL, Reach

AMOUNTS = st.floats(1.0, 1e15)
SHARES = st.floats(1e-3, 1.0)
REACHES = st.lists(st.tuples(AMOUNTS, SHARES), min_size=1, max_size=5, unique_by=lambda p: p[0])
PRESETS = [
    (name, dtype, reach)
    for name, profile in PROFILES.items()
    for table in (profile.products, profile.attention, {"memory": profile.memory})
    for dtype, reach in table.items()
]
ROUNDING = 1e-6


def secs(reach: Reach, amount: float) -> float:
    return amount / reach.at(amount)


@given(REACHES, AMOUNTS, st.floats(1.0, 1e3))
def test_more_work_never_takes_less_time(
    points: list[tuple[float, float]], amount: float, factor: float
) -> None:
    assume(all(b > a * 1.01 for (a, _), (b, _) in pairwise(sorted(points))))
    reach = Reach.lawful(points)
    assert secs(reach, amount * factor) >= secs(reach, amount) * (1 - ROUNDING)


@pytest.mark.parametrize("preset, num", [*zip(PRESETS, cycle([2, 100, 3]))])
def test_piece_of_the_work_takes_at_least_its_share_of_the_time(
    preset: tuple[str, str, Reach], num: int
) -> None:
    *_, reach = preset
    for exponent in range(1, 30):
        amount = 3.0**exponent
        assert num * secs(reach, amount / num) >= secs(reach, amount) * (1 - ROUNDING)


def test_share_between_points_is_a_power_of_the_amount() -> None:
    reach = Reach(((10.0, 0.1), (1000.0, 0.4)))
    assert [reach.at(x) for x in (0.1, 10, 100, 1000, 1e9)] == [
        pytest.approx(x) for x in (0.025, 0.1, 0.2, 0.4, 0.4)
    ]


def test_falling_share_is_constant_below_its_first_point() -> None:
    assert Reach(((10.0, 0.8), (1000.0, 0.2))).at(1.0) == 0.8


def test_lawful_lowers_shares_that_make_more_work_take_less_time() -> None:
    assert Reach.lawful([(2.0, 0.9), (1.0, 0.1)]) == Reach(((1.0, 0.1), (2.0, 0.2)))


@pytest.mark.parametrize(
    "points",
    [(), ((0.0, 0.5),), ((1.0, 0.0),), ((1.0, 1.5),), ((2.0, 0.5), (1.0, 0.5)),
     ((1.0, 0.1), (2.0, 0.3)), ((1.0, float("nan")),), ((float("inf"), 0.5),)],
)  # fmt: skip
def test_invalid_tables_are_rejected(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ss.PlanError, match="cannot be: amounts have to grow"):
        Reach(points)


def test_full_reach_is_the_whole_peak_for_any_amount() -> None:
    assert FULL.at(1e-3) == FULL.at(1e30) == 1
