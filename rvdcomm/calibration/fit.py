"""Fit: the links that explain measured times best under the cost model.

A transfer of a level takes ``alpha_secs * rounds + port_bytes / bytes_per_sec``, where
``port_bytes`` go through the busiest port of that level. This equals ``cost.step_cost`` if no port
below is slower. Times span six orders of magnitude, so the fit minimises the sum of squared
*relative* errors. Huber's weights bound the influence of disturbed samples (P. Huber, Robust
estimation of a location parameter, 1964): each round solves one weighted problem over ``x >= 0``
with ``scipy.optimize.nnls``. The same samples give the same links, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from rvdcomm import LayoutError, Link
from rvdcomm.calibration.hosts import ALL_EQUAL, HostRates

Floats = NDArray[np.float64]

HUBER_K = 1.345
"""Residuals beyond this many standard deviations count less: 95 % efficient on normal errors."""

MAD_PER_SIGMA = 0.6745
"""The median absolute deviation of a normal distribution, in standard deviations."""

IQR_PER_SIGMA = 1.349
"""The distance between the quartiles of a normal distribution, in standard deviations."""

MIN_SCALE = 1e-3
"""Clocks and schedulers repeat to about a thousandth: smaller residuals count as equal."""

NUM_ROUNDS = 50
"""Rounds of reweighting; weights move by less than 1e-6 after about 20."""

LARGE_RESIDUAL = 0.2
"""A level whose median residual is above this is not described by an alpha and a beta."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured transfer.

    Attributes:
        level: index of the level whose ports it measures.
        kind: what was run, such as ``all_gather``.
        tensor_bytes: size of the tensor.
        rounds: messages one after another, on the busiest rank.
        port_bytes: bytes through the busiest port of the level, in one direction.
        secs: time of a call; the slowest rank's, median of the repetitions.
        spread: (third quartile - first quartile) / median of the repetitions.
    """

    level: int
    kind: str
    tensor_bytes: int
    rounds: int
    port_bytes: int
    secs: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class LevelFit:
    """The link of one level, with the relative standard errors of its alpha and its beta.

    The error is infinite where the best alpha, or the best time per byte, is 0.
    """

    name: str
    link: Link
    alpha_error: float
    beta_error: float
    samples: tuple[Sample, ...]

    def secs(self, sample: Sample) -> float:
        """The time of a transfer by the fitted link."""
        return self.link.alpha_secs * sample.rounds + sample.port_bytes / self.link.bytes_per_sec

    def residual(self, sample: Sample) -> float:
        """(fitted - measured) / measured."""
        return self.secs(sample) / sample.secs - 1

    def shows_rate(self, sample: Sample) -> bool:
        """Whether alpha takes at most half the time of a transfer, so that its bytes count."""
        return 2 * self.link.alpha_secs * sample.rounds <= sample.secs

    def rate(self, sample: Sample) -> float:
        """Bytes a second through the port, without what alpha takes: at most half the time."""
        latency = min(self.link.alpha_secs * sample.rounds, sample.secs / 2)
        return sample.port_bytes / (sample.secs - latency)

    @property
    def median_residual(self) -> float:
        """Median of the absolute residuals."""
        return median(abs(self.residual(sample)) for sample in self.samples)

    @property
    def worst(self) -> Sample:
        """The sample with the largest absolute residual."""
        return max(self.samples, key=lambda sample: abs(self.residual(sample)))


@dataclass(frozen=True, slots=True)
class Fit:
    """What a calibration found.

    Attributes:
        levels: the links of all levels, innermost first.
        about: describes the measurement for people.
        rates: the rates of hosts, and which of them differ.
    """

    levels: tuple[LevelFit, ...]
    about: tuple[tuple[str, str], ...] = ()
    rates: HostRates = ALL_EQUAL

    def notes(self) -> dict[str, Any]:
        """Plain values to keep beside the topology: ``{"calibration": ...}``.

        An infinite error is None, because JSON has no infinity.
        """
        levels = [
            {
                "name": level.name,
                "alpha_secs": level.link.alpha_secs,
                "alpha_relative_error": _finite(level.alpha_error),
                "bytes_per_sec": level.link.bytes_per_sec,
                "bytes_per_sec_relative_error": _finite(level.beta_error),
                "median_residual": level.median_residual,
                "samples": [
                    {**asdict(sample), "residual": level.residual(sample)}
                    for sample in level.samples
                ],
            }
            for level in self.levels
        ]
        about = dict(self.about)
        return {"calibration": {**about, "levels": levels, "rates": asdict(self.rates)}}


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def noise_of(samples: Iterable[Sample]) -> float:
    """The relative standard deviation of a repetition; 0 if there are no samples."""
    spreads = [sample.spread for sample in samples]
    return median(spreads) / IQR_PER_SIGMA if spreads else 0.0


def fit_links(
    samples: Sequence[Sample], names: Sequence[str], about: Sequence[tuple[str, str]] = ()
) -> Fit:
    """Fit a link to the samples of every level; ``names[i]`` is the name of level ``i``.

    Raises:
        LayoutError: a level has too few samples to tell alpha from beta, or a time of 0.
    """
    of_level = [tuple(s for s in samples if s.level == level) for level in range(len(names))]
    fits = tuple(_level_fit(name, of) for name, of in zip(names, of_level, strict=True))
    return Fit(fits, tuple(about))


def _level_fit(name: str, samples: tuple[Sample, ...]) -> LevelFit:
    if any(not 0 < sample.secs < float("inf") for sample in samples):
        raise LayoutError(f"{name}: a sample's time is not above 0.")
    if len({(s.port_bytes / s.rounds if s.rounds else 0) for s in samples}) < 2:
        raise LayoutError(
            f"{name}: {len(samples)} samples cannot tell alpha from beta; measure transfers of at "
            "least two sizes."
        )
    rounds = np.array([sample.rounds for sample in samples], dtype=np.float64)
    port_bytes = np.array([sample.port_bytes for sample in samples], dtype=np.float64)
    secs = np.array([sample.secs for sample in samples])
    columns = np.stack([rounds / secs, port_bytes / secs], axis=1)
    # Alphas are microseconds, bytes are millions: in these units both unknowns are near one.
    scales = np.sqrt((columns**2).mean(axis=0))
    found, errors = _robust_fit(columns / scales)
    alpha_secs, secs_per_byte = found / scales
    if secs_per_byte <= 0:
        # All transfers took equally long, so no port was busy: take the fastest rate that was seen.
        secs_per_byte = float(np.min(secs / port_bytes))
    link = Link(float(alpha_secs), float(1 / secs_per_byte))
    return LevelFit(name, link, float(errors[0]), float(errors[1]), samples)


def _robust_fit(columns: Floats) -> tuple[Floats, Floats]:
    """``x >= 0`` with ``columns @ x`` near 1 by Huber's loss, and the relative errors of ``x``."""
    weights = np.ones(len(columns))
    for _ in range(NUM_ROUNDS):
        roots = np.sqrt(weights)
        x: Floats = nnls(columns * roots[:, None], roots)[0]
        residuals = np.abs(columns @ x - 1)
        scale = max(float(np.median(residuals)) / MAD_PER_SIGMA, MIN_SCALE)
        weights = np.minimum(1.0, HUBER_K * scale / np.maximum(residuals, 1e-12))
    normal = columns.T @ (columns * weights[:, None])
    # An unknown that is at its bound has no error of its own.
    variances = np.diag(np.linalg.pinv(normal)) * scale**2
    errors = np.divide(np.sqrt(variances), x, out=np.full(2, np.inf), where=x > 0)
    return x, errors
