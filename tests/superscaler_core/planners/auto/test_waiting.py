"""Laws of waiting settings: the order of evaluations follows estimates and their errors so far."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from superscaler_core.evaluation import Candidate, Trial
from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.estimate import Figures
from superscaler_core.planners.auto.waiting import Waiting
from superscaler_core.plans import PLANS

MEMORY = 100

WIDE, DEEP = Setting(dp=4), Setting(pp=4)
"""Settings of two layouts."""


class Table:
    """Estimates from a table.

    Attributes:
        rough: factor on the seconds of rough estimates.
        asked: settings of which more than a rough estimate was asked for.
    """

    def __init__(self, figures: dict[Setting, tuple[float, float]], rough: float = 1.0) -> None:
        self.figures, self.rough = figures, rough
        self.asked: set[Setting] = set()

    def of(self, setting: Setting) -> Figures:
        self.asked.add(setting)
        return Figures(*self.figures[setting])

    def near(self, setting: Setting) -> Figures:
        secs, num_bytes = self.figures[setting]
        return Figures(self.rough * secs, num_bytes)


def waiting(figures: dict[Setting, tuple[float, float]]) -> Waiting:
    found = Waiting(Table(figures), MEMORY)
    for setting in figures:
        found.add(setting)
    return found


def trial(secs: float, num_bytes: int) -> Trial:
    candidate = Candidate("", 1, PLANS["data_parallel"])
    problem = "needs more" if num_bytes > MEMORY else ""
    return Trial(candidate, inf if problem else secs, num_bytes, problem)


def taken(found: Waiting) -> list[Setting]:
    return [found.take()[0] for _ in range(len(found))]


def test_fastest_setting_is_first_and_is_ready_if_it_is_expected_to_fit() -> None:
    a, b, c = (replace(WIDE, samples=n) for n in range(1, 4))
    found = waiting({a: (3, 90), b: (1, 300), c: (2, 100)})
    assert [found.take() for _ in range(3)] == [(b, 1, False), (c, 2, True), (a, 3, True)]


def test_last_settings_come_by_memory_unless_they_are_expected_to_fit() -> None:
    a, b, c, d = (replace(WIDE, samples=n) for n in range(1, 5))
    found = waiting({a: (1, 300), b: (3, 90), c: (9, 200), d: (4, 90)})
    for setting in (a, b, c):
        found.add(setting, is_last=True)
    assert found.has_promising
    assert taken(found) == [b, d, c, a]


def test_error_of_a_setting_is_expected_of_those_that_differ_in_fewest_choices() -> None:
    near, far = replace(WIDE, zero=1), replace(WIDE, zero=3, samples=2)
    other = replace(WIDE, zero=1, prefetch=1)
    found = waiting({WIDE: (1, 50), near: (2, 50), far: (2, 50), other: (3, 60)})
    found.learn(near, trial(4, 60))
    found.learn(far, trial(2, 50))
    assert found.expected(other) == Figures(6, 72)


def test_error_is_expected_in_part_of_settings_that_differ_in_more_choices() -> None:
    far = replace(WIDE, zero=3, prefetch=1)
    found = waiting({WIDE: (10, 50), far: (10, 50)})
    found.learn(WIDE, trial(12, 60))
    assert found.expected(far).secs == pytest.approx(10 * (1 + 0.2 / 2))
    assert found.expected(far).num_bytes == pytest.approx(50 * (1 + 0.2 / 2))


def test_unknown_layout_is_expected_to_have_the_most_favourable_error() -> None:
    found = waiting({WIDE: (10, 50), DEEP: (12, 50), replace(WIDE, zero=1): (10, 50)})
    found.learn(WIDE, trial(11, 50))
    assert found.expected(DEEP).secs == 12
    found.learn(replace(WIDE, zero=1), trial(9, 50))
    assert found.expected(DEEP).secs == pytest.approx(0.9 * 12)


def test_setting_that_lacks_memory_says_nothing_about_time() -> None:
    near = replace(WIDE, zero=1)
    found = waiting({WIDE: (10, 50), near: (8, 40)})
    found.learn(WIDE, trial(inf, 125))
    assert found.expected(near) == Figures(8, 100)
    assert found.take() == (near, 8, True)


def test_setting_without_an_estimate_is_the_last() -> None:
    found = waiting({WIDE: (inf, inf), DEEP: (1, 400)})
    found.learn(WIDE, trial(3, 80))
    found.add(DEEP, is_last=True)
    found.add(WIDE, is_last=True)
    assert not found.has_promising
    assert taken(found) == [DEEP, WIDE]


def test_every_second_evaluation_is_of_an_unseen_kind_that_may_be_the_fastest() -> None:
    near, deeper = replace(WIDE, samples=2), replace(DEEP, samples=2)
    apart, slow = replace(WIDE, zero=3), Setting(tp=4)
    found = waiting(
        {WIDE: (1, 50), near: (1.1, 50), DEEP: (1.2, 50), deeper: (1.25, 50), apart: (1.2, 50)}
        | {slow: (1.4, 50)}
    )
    chosen = []
    for _ in range(len(found)):
        setting, secs, _ = found.take()
        found.learn(setting, trial(secs, 50))
        chosen.append(setting)
    assert chosen == [WIDE, DEEP, near, apart, deeper, slow]


def test_estimate_is_refined_only_for_settings_that_may_be_the_next() -> None:
    a, b, c = (replace(WIDE, samples=n) for n in range(1, 4))
    table = Table({a: (10, 50), b: (11, 50), c: (20, 50)}, rough=0.8)
    found = Waiting(table, MEMORY)
    for setting in (c, b, a):
        found.add(setting)
    assert found.take() == (a, 10, True)
    assert table.asked == {a, b}
