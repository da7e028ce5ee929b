"""Learned: what guesses of settings are off by, from the settings that were looked at.

A Gaussian process over the logarithm of what was seen over what was guessed. What is alike for all
settings shows after a few; what a choice adds everywhere (the linear part of the kernel) and what
some choices do together (its other part) after some more. Far from all that was seen the deviation
is wide, so a search for the largest expected improvement tries what it does not know.

Source of the formulas: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, log2

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular

from superscaler_core.plan import Keep
from superscaler_core.planners.auto.setting import Setting

Floats = NDArray[np.float64]

COMMON, LAYOUT, CHOICE, TOGETHER, NOISE = 0.5, 0.1, 0.06, 0.1, 0.01
"""Standard deviations, as shares: of what is alike for all settings; of what a layout of the
devices has of its own; of what a choice adds; of what choices do together; and of what the place of
a setting does not tell."""

ALIKE = 2.0
"""How many choices settings differ in that still tell much of each other."""

NUM_LAYOUT = 4
"""Coordinates of a place that name its layout."""

MINOR = 0.4
"""A choice that changes little, as a share of one: what is overlapped, and how words are cut."""

LEAST = 0.1
"""The same of what hardly ever changes anything: whether two blocks' weights are fetched ahead."""

MAX_SEEN = 400
"""Settings that are learned from; of more, the latest."""


def place(setting: Setting) -> Floats:
    """Where a setting is: its layout, then a coordinate for every choice, one for a doubling."""
    degrees = (setting.tp, setting.pp, setting.samples, setting.chunks, setting.coshard)
    switches = (
        setting.heavy, setting.zero > 0, setting.zero == 3, setting.offload, setting.sequence,
        setting.experts, setting.duplex,
    )  # fmt: skip
    minor = (
        setting.keep_coshard is Keep.EVERYTHING, setting.vocabulary, setting.apart,
        setting.slack > 0, setting.prefetch > 0, setting.reductions, setting.moves,
    )  # fmt: skip
    family = (*_FAMILIES, setting.family).index(setting.family)
    return np.array(
        [
            *(family, setting.dp, setting.tp, setting.pp),
            *map(log2, degrees),
            *switches,
            *(MINOR * each for each in minor),
            LEAST * (setting.prefetch > 1),
            *(setting.keep is each for each in Keep),
            *(setting.family == each for each in _FAMILIES),
            *(setting.schedule == each for each in _SCHEDULES),
        ],
        dtype=float,
    )


_FAMILIES = ("axial", "interlaced", "spatial")
_SCHEDULES = ("zero-bubble", "zero-bubble-h2", "zero-bubble-v", "chimera", "dualpipe-v")


@dataclass(frozen=True)
class Expected:
    """Logarithms of factors on guesses, one for every place that was asked for.

    Attributes:
        mean: what is expected.
        deviation: the standard deviation of it.
    """

    mean: Floats
    deviation: Floats


class Learned:
    """Factors on guesses, learned from those of some settings.

    Args:
        scale: of all deviations: how rough the guesses are.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._seen: dict[Setting, tuple[Floats, float]] = {}
        self._solved: _Solved | None = None

    def see(self, setting: Setting, factor: float) -> None:
        """What was seen of a setting, over what was guessed; what was known of it is forgotten."""
        self._seen.pop(setting, None)
        self._seen[setting] = place(setting), log(factor)
        self._solved = None

    def at(self, places: Sequence[Floats]) -> Expected:
        """What to expect of settings, by their places."""
        asked = np.array(places)
        variance = _variance(asked)
        if not self._seen:
            return Expected(np.zeros(len(asked)), self._scale * np.sqrt(variance))
        if self._solved is None:
            self._solved = _solved(list(self._seen.values())[-MAX_SEEN:])
        seen, root, told = self._solved.places, self._solved.root, self._solved.told
        across: Floats = solve_triangular(root, _covariance(seen, asked), lower=True)
        left = np.maximum(0.0, variance - (across**2).sum(0)) + NOISE**2
        return Expected(across.T @ told, self._scale * np.sqrt(left))


@dataclass(frozen=True)
class _Solved:
    """What was seen, as it is asked for again and again.

    Attributes:
        places: where it was seen.
        root: of the covariance, lower triangular.
        told: the inverse of the root, times what was seen.
    """

    places: Floats
    root: Floats
    told: Floats


def _solved(seen: Sequence[tuple[Floats, float]]) -> _Solved:
    places = np.array([where for where, _ in seen])
    own = _covariance(places, places) + NOISE**2 * np.eye(len(seen))
    root: Floats = cholesky(own, lower=True)
    values = np.array([value for _, value in seen])
    return _Solved(places, root, solve_triangular(root, values, lower=True))


def _covariance(a: Floats, b: Floats) -> Floats:
    """Of factors at places, (n, d) with (m, d): (n, m)."""
    is_layout: Floats = 1.0 * (a[:, None, :NUM_LAYOUT] == b[None, :, :NUM_LAYOUT]).all(-1)
    a, b = a[:, NUM_LAYOUT:], b[:, NUM_LAYOUT:]
    products: Floats = a @ b.T
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)
    together: Floats = np.exp(-np.maximum(0.0, squares - 2 * products) / (2 * ALIKE**2))
    return COMMON**2 + LAYOUT**2 * is_layout + CHOICE**2 * products + TOGETHER**2 * together


def _variance(a: Floats) -> Floats:
    """The diagonal of the covariance of places with themselves."""
    own: Floats = (a[:, NUM_LAYOUT:] ** 2).sum(1)
    return COMMON**2 + LAYOUT**2 + CHOICE**2 * own + TOGETHER**2
