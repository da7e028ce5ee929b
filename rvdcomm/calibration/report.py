"""Report: measured times, fitted times and their differences, in 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rvdcomm.calibration.fit import LARGE_RESIDUAL, Fit, LevelFit
from rvdcomm.calibration.hosts import INSIDE, INTO, OUT, HostRates
from rvdcomm.layout import ranges_text
from rvdcomm.units import bytes_text, secs_text

_VERBS = {OUT: "sends", INTO: "receives", INSIDE: "moves bytes inside"}

_HEAD = ("level", "kind", "tensor", "rounds", "port bytes", "measured", "spread", "fitted", "error")


def table(fit: Fit) -> str:
    """Every sample with its residual, every level's link, the hosts that differ, warnings."""
    rows = [_HEAD, *(row for level in fit.levels for row in _rows(level))]
    about = "  ".join(f"{name} {value}" for name, value in fit.about)
    links = [*map(_summary, fit.levels), *differences(fit.rates)]
    return "\n".join([about, "", *_grid(rows), "", *links, *_warnings(fit)])


def _rows(level: LevelFit) -> Iterator[tuple[str, ...]]:
    for sample in level.samples:
        yield (
            level.name,
            sample.kind,
            bytes_text(sample.tensor_bytes),
            str(sample.rounds),
            bytes_text(sample.port_bytes),
            secs_text(sample.secs),
            f"{sample.spread:.0%}",
            secs_text(level.secs(sample)),
            f"{level.residual(sample):+.0%}",
        )


def _summary(level: LevelFit) -> str:
    return (
        f"{level.name:8}alpha {secs_text(level.link.alpha_secs)} ± {level.alpha_error:.0%}   "
        f"beta {rate_text(level.link.bytes_per_sec)} ± {level.beta_error:.0%}   "
        f"median error {level.median_residual:.0%}"
    )


def rate_text(bytes_per_sec: float) -> str:
    """Bytes a second as vendors write them, in powers of 1000.

    >>> rate_text(23.9e6), rate_text(450e9)
    ('23.9 MB/s', '450 GB/s')
    """
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        # 999.99 of a unit would be shown as 1000.
        if bytes_per_sec >= 0.99995 * scale:
            return f"{bytes_per_sec / scale:.4g} {unit}"
    return f"{bytes_per_sec:.4g} B/s"


def differences(rates: HostRates) -> Iterator[str]:
    """A line for each host that differs from most, and for each pair that is slow."""

    def name(host: int) -> str:
        ranks = rates.hosts[host]
        return f"host {host} ({'ranks' if len(ranks) > 1 else 'rank'} {ranges_text(ranks)})"

    for way in rates.ways:
        usual = rate_text(way.usual_bytes_per_sec)
        for host, rate in way.others:
            if not rates.is_unsure(way, host):
                verb = _VERBS[way.name]
                yield f"{name(host)} {verb} at {rate_text(rate)} where the median host has {usual}"
    if len(rates.hosts) == 2 and OUT in {way.name for way in rates.ways} and not rates.unsure:
        yield "of two hosts, which one limits the rate between them cannot be told"
    for pair in rates.unsure:
        yield (
            f"{name(pair.src)} sends to {name(pair.dst)} at {rate_text(pair.bytes_per_sec)} where "
            f"the median is {rate_text(pair.expected_bytes_per_sec)}:\n  one of them is slow, and "
            "only pairs with further hosts could tell which"
        )
    for pair in rates.slow_paths:
        yield (
            f"{name(pair.src)} sends to {name(pair.dst)} at {rate_text(pair.bytes_per_sec)} where "
            f"both reach {rate_text(pair.expected_bytes_per_sec)} with others:\n  the path between "
            "them is slow, which the links of hosts do not express"
        )


def _warnings(fit: Fit) -> Iterator[str]:
    for level in fit.levels:
        if level.median_residual > LARGE_RESIDUAL:
            worst = level.worst
            yield (
                f"warning: an alpha and a beta describe {level.name} badly, half of its transfers "
                f"worse than {level.median_residual:.0%};\n         the worst is {worst.kind} of "
                f"{bytes_text(worst.tensor_bytes)}, {level.residual(worst):+.0%}. "
                "Is the machine busy with something else?"
            )


def _grid(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(cells)
        )
