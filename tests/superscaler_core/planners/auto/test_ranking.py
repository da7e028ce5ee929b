"""Laws of ranking: the definition of the expected improvement, and the order of choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import inf
from typing import cast

import numpy as np
import pytest

from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.guess import Guess
from superscaler_core.planners.auto.ranking import Ranking, _improvement
from superscaler_core.planners.search.request import Candidate, Trial
from tests.superscaler_core.planners.search.test_search import request

SETTINGS = [Setting(dp=dp, samples=samples) for dp in (1, 2) for samples in (1, 2, 4)]


@cache
def guess() -> Guess:
    return Guess(request("mlp", 2))


def ranking(memory_bytes: int = 1 << 60) -> Ranking:
    found = Ranking(guess(), memory_bytes)
    for setting in SETTINGS:
        found.add(setting)
    return found


def trial(secs: float = inf, peak_bytes: int = 0, *, is_estimate: bool = False) -> Trial:
    candidate = Candidate("x", 1, lambda plan: None)
    return Trial(candidate, secs, peak_bytes, "" if secs < inf else "needs", is_estimate)


@pytest.mark.parametrize("better", [-1.0, -0.1, 0.0, 0.3])
@pytest.mark.parametrize("deviation", [0.05, 0.5])
def test_expected_improvement_equals_the_mean_of_samples(better: float, deviation: float) -> None:
    drawn = np.random.default_rng(0).normal(better, deviation, 400_000)
    mean = float(np.maximum(drawn, 0.0).mean())
    found = _improvement(np.array([better]), np.array([deviation]))
    assert found == pytest.approx([mean], rel=0.01, abs=1e-4)


def test_every_waiting_setting_is_taken_once() -> None:
    found = ranking()
    taken = [found.take()[0] for _ in range(len(found))]
    assert len(found) == 0
    assert sorted(map(str, taken)) == sorted(map(str, SETTINGS))


def test_expected_seconds_follow_the_observed_error_of_guesses() -> None:
    found = ranking()
    for setting in SETTINGS[:-1]:
        found.learn(setting, trial(2 * guess().secs(setting), 1000))
    expected = {setting: secs for setting, secs in (found.take() for _ in SETTINGS)}
    for setting in SETTINGS:
        assert expected[setting] == pytest.approx(2 * guess().secs(setting), rel=0.1)


def test_setting_that_lacks_memory_is_taken_last() -> None:
    small, fast = Setting(samples=1), Setting(samples=8)
    num_bytes = [guess().num_bytes(each) for each in (small, fast)]
    assert guess().secs(fast) < guess().secs(small)
    for limit, first in ((int(1.1 * num_bytes[0]), small), (int(1.1 * num_bytes[1]), fast)):
        found = Ranking(guess(), limit)
        for setting, need_bytes in zip((small, fast), num_bytes, strict=True):
            found.add(setting)
            # The trials show that guesses of memory are right, and tell nothing about time.
            found.learn(setting, trial(peak_bytes=int(need_bytes)))
        assert found.take()[0] == first


def test_best_seconds_are_those_of_the_fastest_trial_that_fits() -> None:
    found = ranking()
    found.learn(SETTINGS[0], trial(3.0, 10))
    found.learn(SETTINGS[1], trial(peak_bytes=10))
    found.learn(SETTINGS[2], trial(4.0, 10))
    assert found.best_secs == 3.0


def test_setting_similar_to_infeasible_ones_is_taken_last() -> None:
    found = Ranking(guess(), 1 << 60)
    like, other = Setting(family="interlaced", pp=4), Setting(dp=2, samples=4)
    for setting in (like, other):
        found.add(setting)
    for samples in (1, 2, 4):
        found.learn(replace(like, samples=samples), trial())
        found.learn(replace(other, samples=samples), trial(guess().secs(other), 1000))
    assert found.take()[0] == other


class Given:
    """Guesses that a test gives: seconds and bytes by setting; one byte by default."""

    def __init__(self, secs: Mapping[Setting, float], num_bytes: Mapping[Setting, int]) -> None:
        self._secs, self._bytes = secs, num_bytes

    def secs(self, setting: Setting) -> float:
        return self._secs[setting]

    def num_bytes(self, setting: Setting) -> float:
        return self._bytes.get(setting, 1)


def given(secs: Mapping[Setting, float], num_bytes: Mapping[Setting, int]) -> Ranking:
    return Ranking(cast("Guess", Given(secs, num_bytes)), 100)


def test_best_setting_of_every_promising_layout_is_taken_first() -> None:
    near, best, slow, large = (Setting(dp=dp, pp=16 // dp) for dp in (2, 4, 8, 16))
    others = [replace(each, samples=2) for each in (near, best)]
    secs = {near: 1.1, best: 1.0, slow: 1.2, large: 0.5, others[0]: 1.2, others[1]: 1.04}
    found = given(secs, {large: 101})
    for setting in secs:
        found.add(setting)
    found.begin_with_layouts()
    taken = [found.take() for _ in range(3)]
    # After the best of each layout come all settings that are nearly as good as the best.
    expected = {best: 1.0, near: 1.1, others[1]: 1.04}
    assert taken == [(each, pytest.approx(secs)) for each, secs in expected.items()]
    assert len(found) == 3


def test_every_third_choice_takes_a_small_but_nearly_certain_gain() -> None:
    """Small changes of a seen setting wait beside unknown settings that are guessed 10 % slower."""
    seen, *like = (Setting(prefetch=n, moves=moves) for n in (0, 1) for moves in (False, True))
    far = [Setting(samples=16, coshard=coshard, heavy=True) for coshard in (2, 4, 8)]
    found = given(dict.fromkeys((seen, *like), 1.0) | dict.fromkeys(far, 1.1), {})
    found.learn(seen, trial(1.0, 1))
    for setting in (*like, *far):
        found.add(setting)
    assert [found.take()[0] in like for _ in range(4)] == [False, False, True, False]


def test_first_choice_ranks_all_waiting_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superscaler_core.planners.auto.ranking.RANKED", 1)
    slow_first = {setting: 10.0 - i for i, setting in enumerate(SETTINGS)}
    found = given(slow_first, dict.fromkeys(SETTINGS, 1))
    for setting in SETTINGS:
        found.add(setting)
    assert found.take()[0] == SETTINGS[-1]
