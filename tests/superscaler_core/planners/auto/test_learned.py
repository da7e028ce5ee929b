"""Laws of learned errors: predictions equal observations, and similar settings are similar."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import exp

import numpy as np
import pytest

from superscaler_core.plan import Keep
from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.learned import (
    CHOICE,
    COMMON,
    LAYOUT,
    NOISE,
    TOGETHER,
    Expected,
    Learned,
    place,
)

EVERY = [
    Setting(dp=8 // (tp * pp), tp=tp, pp=pp, samples=samples, keep=keep, zero=zero)
    for tp, pp in [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]
    for samples, keep, zero in product((1, 2, 4), (Keep.EVERYTHING, Keep.BLOCK_INPUTS), (0, 3))
]


def expected(learned: Learned, settings: list[Setting]) -> Expected:
    return learned.at([place(each) for each in settings])


def factor(setting: Setting) -> float:
    """The error of a guess that ignores tensor parallelism and recomputation."""
    return 1.5 * 1.1**setting.tp * (1.2 if setting.keep is Keep.BLOCK_INPUTS else 1.0)


def test_prior_has_zero_mean_and_a_large_deviation() -> None:
    found = expected(Learned(), EVERY)
    assert not found.mean.any()
    assert (found.deviation > COMMON).all()


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_prediction_at_a_seen_setting_is_near_its_observation(scale: float) -> None:
    learned = Learned(scale)
    for setting in EVERY[::3]:
        learned.see(setting, factor(setting))
    found = expected(learned, EVERY[::3])
    assert np.exp(found.mean) == pytest.approx([factor(each) for each in EVERY[::3]], rel=0.02)
    assert (found.deviation < 3 * scale * NOISE).all()


def test_latest_observation_replaces_the_earlier_one() -> None:
    learned = Learned()
    learned.see(EVERY[0], 2.0)
    learned.see(EVERY[0], 1.0)
    assert exp(expected(learned, EVERY[:1]).mean[0]) == pytest.approx(1.0, rel=0.01)


def test_common_error_is_learned_from_one_observation() -> None:
    learned = Learned()
    learned.see(EVERY[0], 1.5)
    assert (np.exp(expected(learned, EVERY).mean) > 1.4).all()


def test_error_of_a_choice_is_predicted_in_other_layouts() -> None:
    """All settings of two smaller degrees and one setting of a third degree are seen."""
    learned = Learned()
    mine = [each for each in EVERY if each.tp == 4]
    for setting in (*(each for each in EVERY if each.tp < 4), mine[0]):
        learned.see(setting, factor(setting))
    found = np.exp(expected(learned, mine).mean)
    assert found == pytest.approx([factor(each) for each in mine], rel=0.03)


def test_other_layouts_have_a_larger_deviation() -> None:
    learned = Learned()
    learned.see(EVERY[0], 1.0)
    near, far = replace(EVERY[0], samples=2), Setting(tp=2, pp=4, samples=2)
    known = expected(learned, [EVERY[0], near, far]).deviation
    assert known[0] < known[1] < known[2] - 0.05


def test_prediction_equals_the_formula_of_a_conditional_mean() -> None:
    """The definition of a conditional distribution, applied to two settings."""
    learned = Learned()
    learned.see(Setting(dp=2), exp(0.3))
    other = Setting(dp=2, offload=True, zero=1)
    # The squared distance of the two settings is 2: they differ in two coordinates.
    base = COMMON**2 + LAYOUT**2
    common = float(place(Setting(dp=2))[4:] @ place(other)[4:])
    own = float(place(Setting(dp=2))[4:] @ place(Setting(dp=2))[4:])
    first = base + CHOICE**2 * own + TOGETHER**2
    across = base + CHOICE**2 * common + TOGETHER**2 * exp(-2 / 8)
    found = expected(learned, [other])
    assert found.mean[0] == pytest.approx(0.3 * across / (first + NOISE**2))


def test_different_settings_have_different_places() -> None:
    places = [tuple(place(each)) for each in EVERY]
    assert len({*places}) == len(EVERY)
