"""Laws of the fit: it recovers links from the times that these links give."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.calibration import Sample, fit_links
from rvdcomm.calibration.fit import Fit

SIZES = [768 * 4**i for i in range(9)]


def samples_of(
    link: rv.Link, noise: float = 0.0, outliers: int = 0, level: int = 0, seed: int = 0
) -> list[Sample]:
    """Samples of 1, 3 and 7 rounds with relative noise; outliers take 5 times as long."""
    random = np.random.default_rng(seed)
    found = [
        Sample(
            level,
            f"{rounds} rounds",
            size,
            rounds,
            size,
            link.alpha_secs * rounds + size / link.bytes_per_sec,
        )
        for rounds in (1, 3, 7)
        for size in SIZES
    ]
    disturbed = set(random.choice(len(found), outliers, replace=False).tolist())
    return [
        Sample(
            *(s.level, s.kind, s.tensor_bytes, s.rounds, s.port_bytes),
            secs=s.secs * float(np.exp(random.normal(0, noise))) * (5 if i in disturbed else 1),
        )
        for i, s in enumerate(found)
    ]


def fitted(samples: list[Sample]) -> rv.Link:
    return fit_links(samples, ["rank"]).levels[0].link


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-7, 1e-2), st.floats(1e5, 1e12))
def test_fit_recovers_the_link_from_times_without_noise(
    alpha_secs: float, bytes_per_sec: float
) -> None:
    link = fitted(samples_of(rv.Link(alpha_secs, bytes_per_sec)))
    # Within a billionth of the longest time: alpha may be a millionth of the fitted times.
    longest = SIZES[-1] / bytes_per_sec + 7 * alpha_secs
    assert link.alpha_secs == pytest.approx(alpha_secs, rel=1e-6, abs=1e-9 * longest)
    assert link.bytes_per_sec == pytest.approx(bytes_per_sec, rel=1e-6) or (
        SIZES[-1] / bytes_per_sec < 1e-6 * alpha_secs
    )


@pytest.mark.parametrize("outliers", [0, 4])
@pytest.mark.parametrize("seed", range(3))
def test_noise_and_outliers_change_a_link_by_at_most_16_percent(seed: int, outliers: int) -> None:
    link = fitted(samples_of(rv.Link(60e-6, 1.15e9), noise=0.1, outliers=outliers, seed=seed))
    # 27 samples with 10 % noise give a standard error of about 4 %. Up to four are outliers.
    assert link.alpha_secs == pytest.approx(60e-6, rel=0.16)
    assert link.bytes_per_sec == pytest.approx(1.15e9, rel=0.16)


def test_standard_errors_match_the_spread_of_noisy_fits() -> None:
    truth = rv.Link(60e-6, 1.15e9)
    fits = [
        fit_links(samples_of(truth, noise=0.1, seed=seed), ["rank"]).levels[0]
        for seed in range(100)
    ]
    misses = [(fit.link.alpha_secs / 60e-6 - 1) / fit.alpha_error for fit in fits] + [
        (fit.link.bytes_per_sec / 1.15e9 - 1) / fit.beta_error for fit in fits
    ]
    # Misses in standard errors are about normal: two thirds are within one, most within three.
    assert 0.55 < np.mean(np.abs(misses) < 1) < 0.8
    assert np.mean(np.abs(misses) < 3) > 0.95


def test_doubled_times_double_alpha_and_halve_bytes_per_sec() -> None:
    samples = samples_of(rv.Link(60e-6, 1.15e9), noise=0.3)
    slow = [Sample(s.level, s.kind, 0, s.rounds, s.port_bytes, 2 * s.secs) for s in samples]
    one, two = fitted(samples), fitted(slow)
    assert two.alpha_secs == pytest.approx(2 * one.alpha_secs)
    assert two.bytes_per_sec == pytest.approx(one.bytes_per_sec / 2)


def test_each_level_is_fitted_from_its_samples() -> None:
    near, far = rv.Link(20e-6, 3e9), rv.Link(60e-6, 1e8)
    fit = fit_links(samples_of(far, level=1) + samples_of(near), ["rank", "host"])
    assert [level.name for level in fit.levels] == ["rank", "host"]
    assert fit.levels[0].link.bytes_per_sec == pytest.approx(3e9)
    assert fit.levels[1].link.bytes_per_sec == pytest.approx(1e8)


@pytest.mark.parametrize(
    "secs, alpha_secs, bytes_per_sec, bound",
    [
        ([1e-3, 1e-3, 1e-3], 1e-3, 4e6 / 1e-3, "bytes_per_sec"),
        ([1e-6, 1e-3, 1.2], 0, 0, "alpha"),
    ],
    ids=["no port is busy", "no round takes time"],
)
def test_parameter_that_would_be_negative_is_at_its_bound_with_a_null_error_in_the_file(
    secs: list[float], alpha_secs: float, bytes_per_sec: float, bound: str, tmp_path: Path
) -> None:
    sizes = [4, 4_000, 4_000_000]
    samples = [Sample(0, "swap", 0, 1, size, t) for size, t in zip(sizes, secs, strict=True)]
    fit = fit_links(samples, ["rank"])
    assert fit.levels[0].link.alpha_secs == pytest.approx(alpha_secs, rel=0.01, abs=1e-7)
    assert fit.levels[0].link.bytes_per_sec >= 0.99 * bytes_per_sec
    path = tmp_path / "topology.json"
    rv.Topology.single_host(2, 1e-5, 1e9).save(path, notes=fit.notes())
    (level,) = json.loads(path.read_text())["calibration"]["levels"]
    known = {"alpha": fit.levels[0].alpha_error, "bytes_per_sec": fit.levels[0].beta_error}
    assert known.pop(bound) == inf
    assert level[f"{bound}_relative_error"] is None
    assert [level[f"{name}_relative_error"] for name in known] == list(known.values())


def fit_of(*errors: float) -> Fit:
    """A fit to three transfers whose times are multiplied by ``errors``."""
    secs = [1e-3 + size / 1e9 for size in (10**4, 10**6, 10**8)]
    return fit_links(
        [
            Sample(0, "swap", 0, 1, size, t * error)
            for size, t, error in zip((10**4, 10**6, 10**8), secs, errors, strict=True)
        ],
        ["rank"],
    )


def test_residuals_are_relative_to_the_measured_times() -> None:
    level = fit_of(1.0, 1.3, 1.0).levels[0]
    for sample in level.samples:
        assert level.residual(sample) == pytest.approx(
            (level.secs(sample) - sample.secs) / sample.secs
        )
    assert level.worst is level.samples[1]


def test_notes_hold_every_sample_with_its_residual_and_are_json() -> None:
    fit = fit_of(1.0, 1.2, 0.9)
    notes = json.loads(json.dumps(fit.notes()))["calibration"]["levels"][0]
    assert [s["secs"] for s in notes["samples"]] == [s.secs for s in fit.levels[0].samples]
    assert [s["residual"] for s in notes["samples"]] == [
        fit.levels[0].residual(s) for s in fit.levels[0].samples
    ]


@pytest.mark.parametrize(
    "samples, message",
    [
        ([], "rank: 0 samples cannot tell alpha from beta"),
        ([Sample(0, "swap", 4, 1, 4, 1.0)] * 3, "rank: 3 samples cannot tell alpha from beta"),
        ([Sample(0, "swap", 4, 2, 8, 1.0), Sample(0, "swap", 4, 1, 4, 1.0)], "cannot tell alpha"),
        ([Sample(0, "swap", 4, 1, 4, 0.0)], "rank: a sample's time is not above 0"),
        ([Sample(0, "swap", 4, 1, 4, float("nan"))], "rank: a sample's time is not above 0"),
    ],
)
def test_insufficient_or_invalid_samples_are_rejected(samples: list[Sample], message: str) -> None:
    with pytest.raises(rv.LayoutError, match=message):
        fit_links(samples, ["rank"])
