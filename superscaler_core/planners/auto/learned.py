"""Learned: the errors of guesses, learned from the settings that were looked at.

A Gaussian process over ``log(seen / guessed)``. An error that all settings share is learned from a
few of them. The error of a choice (the linear part of the kernel) and of choices together (the
squared exponential part) needs some more. Far from all seen settings the standard deviation is
large, so a search for the largest expected improvement also tries unknown settings.

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
"""Standard deviations of the parts of an error's logarithm.

The parts are common to all settings, to a layout of the devices, to a choice, and to choices
together; ``NOISE`` is what the place of a setting does not explain.
"""

ALIKE = 2.0
"""Length scale of the squared exponential, in choices that differ."""

NUM_LAYOUT = 4
"""Number of coordinates, at the start of a place, that name the layout."""

MINOR = 0.4
"""Coordinate of a choice with a small effect, in place of 1: overlap, or how words are cut."""

LEAST = 0.1
"""Coordinate of a choice with hardly any effect: whether two blocks' weights are prefetched."""

MAX_SEEN = 400
"""Number of settings to learn from, the latest ones."""


def place(setting: Setting) -> Floats:
    """The coordinates of a setting: its layout, then one per choice; doubling a degree adds 1."""
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
    """Predicted logarithms of the factors on guesses, one for every place asked for.

    Attributes:
        mean: expected values.
        deviation: standard deviations.
    """

    mean: Floats
    deviation: Floats


class Learned:
    """A model of the factors on guesses, learned from the settings that were seen.

    Args:
        scale: factor on all standard deviations; larger for rougher guesses.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._seen: dict[Setting, tuple[Floats, float]] = {}
        self._solved: _Solved | None = None

    def see(self, setting: Setting, factor: float) -> None:
        """Record ``factor``, seen over guessed, for a setting, in place of an earlier record."""
        self._seen.pop(setting, None)
        self._seen[setting] = place(setting), log(factor)
        self._solved = None

    def at(self, places: Sequence[Floats]) -> Expected:
        """The prediction for settings, by their places."""
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
    """The factorized covariance of the seen settings, which all predictions reuse.

    Attributes:
        places: places of the seen settings, ``[n, d]``.
        root: lower Cholesky factor of their covariance, ``[n, n]``.
        told: inverse of ``root`` times the seen logarithms, ``[n]``.
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
    """Prior covariance of the logarithms at two lists of places, [n, d] and [m, d]: [n, m]."""
    is_layout: Floats = 1.0 * (a[:, None, :NUM_LAYOUT] == b[None, :, :NUM_LAYOUT]).all(-1)
    a, b = a[:, NUM_LAYOUT:], b[:, NUM_LAYOUT:]
    products: Floats = a @ b.T
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)
    together: Floats = np.exp(-np.maximum(0.0, squares - 2 * products) / (2 * ALIKE**2))
    return COMMON**2 + LAYOUT**2 * is_layout + CHOICE**2 * products + TOGETHER**2 * together


def _variance(a: Floats) -> Floats:
    """The diagonal of ``_covariance(a, a)``."""
    own: Floats = (a[:, NUM_LAYOUT:] ** 2).sum(1)
    return COMMON**2 + LAYOUT**2 + CHOICE**2 * own + TOGETHER**2
