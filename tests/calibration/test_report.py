"""Laws of the report: a line per sample, at most 100 columns, and a warning for a bad fit."""

from __future__ import annotations

from rvdcomm.calibration import Sample, fit_links, table

GOOD = [Sample(0, "all_gather", 16 * n, 3, n, 3e-4 + n / 1e9, 0.07) for n in (10**3, 10**6, 10**8)]
BAD = [
    Sample(1, "transfer", 4**i, 4, 4**i, (1e-4 + 4**i / 1e8) * (3 if i % 2 else 1), 0.5)
    for i in range(4, 14)
]
ABOUT = [("ranks", "8"), ("executor", "auto")]


def test_table_has_a_line_per_sample_within_100_columns() -> None:
    lines = table(fit_links(GOOD + BAD, ["rank", "host"], ABOUT)).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("all_gather" in line for line in lines) >= len(GOOD)
    assert sum(line.startswith("host   transfer") for line in lines) == len(BAD)


def test_table_shows_measured_and_fitted_times_with_the_error() -> None:
    text = table(fit_links(GOOD, ["rank"], ABOUT))
    assert "ranks 8  executor auto" in text
    line = next(line for line in text.splitlines() if "15.26 MiB" in line)
    assert line.split()[-6:] == ["1.3", "ms", "7%", "1.3", "ms", "+0%"]
    assert "rank    alpha 100 us ± 0%   beta 1 GB/s ± 0%   median error 0%" in text


def test_only_a_bad_fit_warns_and_names_its_level_and_worst_sample() -> None:
    text = table(fit_links(GOOD + BAD, ["rank", "host"]))
    (warning,) = [line for line in text.splitlines() if line.startswith("warning")]
    assert "describe host badly" in warning
    assert "the worst is transfer of" in text
    assert "warning" not in table(fit_links(GOOD, ["rank"]))
