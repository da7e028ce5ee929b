"""Laws of what is learned: what was seen is believed, and what is like it is expected to be so."""

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
    """What a guess is off by that knows nothing of tensor parallel and recomputation."""
    return 1.5 * 1.1**setting.tp * (1.2 if setting.keep is Keep.BLOCK_INPUTS else 1.0)


def test_nothing_is_expected_at_first() -> None:
    found = expected(Learned(), EVERY)
    assert not found.mean.any()
    assert (found.deviation > COMMON).all()


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_what_was_seen_is_believed(scale: float) -> None:
    learned = Learned(scale)
    for setting in EVERY[::3]:
        learned.see(setting, factor(setting))
    found = expected(learned, EVERY[::3])
    assert np.exp(found.mean) == pytest.approx([factor(each) for each in EVERY[::3]], rel=0.02)
    assert (found.deviation < 3 * scale * NOISE).all()


def test_the_latest_is_believed() -> None:
    learned = Learned()
    learned.see(EVERY[0], 2.0)
    learned.see(EVERY[0], 1.0)
    assert exp(expected(learned, EVERY[:1]).mean[0]) == pytest.approx(1.0, rel=0.01)


def test_what_is_alike_for_all_is_seen_after_one() -> None:
    learned = Learned()
    learned.see(EVERY[0], 1.5)
    assert (np.exp(expected(learned, EVERY).mean) > 1.4).all()


def test_what_a_choice_adds_is_seen_in_other_layouts() -> None:
    """From two layouts, the best of the third, of which one setting was seen."""
    learned = Learned()
    mine = [each for each in EVERY if each.tp == 4]
    for setting in (*(each for each in EVERY if each.tp < 4), mine[0]):
        learned.see(setting, factor(setting))
    found = np.exp(expected(learned, mine).mean)
    assert found == pytest.approx([factor(each) for each in mine], rel=0.03)


def test_other_layouts_are_less_known() -> None:
    learned = Learned()
    learned.see(EVERY[0], 1.0)
    near, far = replace(EVERY[0], samples=2), Setting(tp=2, pp=4, samples=2)
    known = expected(learned, [EVERY[0], near, far]).deviation
    assert known[0] < known[1] < known[2] - 0.05


def test_the_covariance_is_what_its_parts_say() -> None:
    """By the definition of a conditional distribution, of two settings."""
    learned = Learned()
    learned.see(Setting(dp=2), exp(0.3))
    other = Setting(dp=2, offload=True, zero=1)
    # Three coordinates of the first are one, as of any: what is kept, and these two differ in two.
    base = COMMON**2 + LAYOUT**2
    common = float(place(Setting(dp=2))[4:] @ place(other)[4:])
    own = float(place(Setting(dp=2))[4:] @ place(Setting(dp=2))[4:])
    first = base + CHOICE**2 * own + TOGETHER**2
    across = base + CHOICE**2 * common + TOGETHER**2 * exp(-2 / 8)
    found = expected(learned, [other])
    assert found.mean[0] == pytest.approx(0.3 * across / (first + NOISE**2))


def test_settings_of_one_place_are_alike_in_all_that_counts() -> None:
    places = [tuple(place(each)) for each in EVERY]
    assert len({*places}) == len(EVERY)
