"""The benchmark's tables: times, their ratios, and how many times as fast as point-to-point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from operator import itemgetter
from statistics import median
from typing import Any

from bench.rvd.cases import IN_GROUP, Row
from bench.tables import Lines, grid

BY_HAND = "torch"
"""The method of torch's own collectives; its ways have names of their own after a colon."""

LIMIT = "limit"

TIMES: Mapping[str, str] = {
    **{name: name for name in ("ours", "pool", "peer", "dist", "p2p")},
    "dtensor": "DTensor",
    **{name: name for name in (BY_HAND, LIMIT)},
}
"""The columns with times, in order, by what they are the times of."""

RATIOS: Mapping[str, tuple[str, str]] = {
    "ours ÷ limit": ("ours", LIMIT),
    "P2P ÷ ours": ("p2p", "ours"),
    "DTensor ÷ ours": ("dtensor", "ours"),
    "torch ÷ ours": (BY_HAND, "ours"),
}
"""The columns with ratios: of which time to which."""

COLUMNS = ("case", "groups", *TIMES.values(), *RATIOS, "plan")
LEGEND = """\
ours: as called; pool: the same with the source in the pool; peer, dist: compiled, into out.
p2p: point-to-point, where every reader pulls what it needs of every part from one writer.
torch: the fastest of torch's own collectives, called by hand, where DTensor may choose another.
limit: the least time that the bytes to be moved can take; it limits no method of the benchmark.
plan: ag all_gather, ar all_reduce, rs reduce_scatter, a2a all_to_all, ex exchange, tr transfer."""


def table(result: Mapping[str, Any]) -> str:
    """A table per size, of median times in ms, or of modelled ones if the result says so."""
    parts = []
    kind = result.get("times", "median")
    for size in dict.fromkeys(row["size"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["size"] == size]
        parts.append(f"{size} float32, {kind} ms:")
        parts.append(grid(_filled([COLUMNS, *map(_cells, rows)])))
    return "\n\n".join(parts)


def _filled(lines: Sequence[Sequence[str]]) -> Lines:
    """The lines without columns in which no row has a value."""
    columns = [(head, *cells) for head, *cells in zip(*lines, strict=True) if set(cells) != {"-"}]
    return [*zip(*columns, strict=True)]


def _cells(row: Row) -> tuple[str, ...]:
    times = times_of(row)
    ratios = [ratio(times, *names) for names in RATIOS.values()]
    return (
        row["category"],
        _num_ranks(row["src"]) if row["relation"] == IN_GROUP else row["relation"],
        *(_ms(times[name]) if name in times else "-" for name in TIMES),
        *("-" if found is None else _ratio(found) for found in ratios),
        _steps(row["steps"]),
    )


def ratio(times: Mapping[str, float], of: str, to: str) -> float | None:
    """The time of one column over that of another; None unless both take time."""
    over, under = times.get(of), times.get(to)
    return over / under if over and under else None


def times_of(row: Row) -> dict[str, float]:
    """The seconds of every method, as of ``medians_of``, and of the limit where there is one."""
    limit = row["limit_secs"]
    return medians_of(row) | ({LIMIT: limit} if limit else {})


def medians_of(row: Row) -> dict[str, float]:
    """The median time of each method; of ways by hand that of the fastest."""
    found: dict[str, float] = {}
    for name, samples in row["samples"].items():
        method, secs = name.partition(":")[0], median(samples or [inf])
        found[method] = min(secs, found.get(method, inf))
    return {name: secs for name, secs in found.items() if secs < inf}


ALL = "all"


def largest_ratios(rows: Iterable[Row]) -> dict[str, tuple[float, Row]]:
    """The largest *P2P ÷ ours* of each category and of ``ALL``, with the row that has it.

    Cases in which no data move do not count: both methods only copy there.
    """
    found: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        found.setdefault(row["category"], [])
        mine = ratio(times_of(row), *RATIOS["P2P ÷ ours"])
        if mine is not None and row["wire_bytes"]:
            found[row["category"]].append((mine, row))
    found[ALL] = [*chain(*found.values())]
    return {name: max(each, key=itemgetter(0)) for name, each in found.items() if each}


def up_to(rows: Iterable[Row]) -> str:
    """A line "up to N x" for each category and for all cases; empty without point-to-point."""
    lines = [
        (name, f"up to {_ratio(most)} x", f"{row['category']}, {row['relation']}, {row['size']}")
        for name, (most, row) in largest_ratios(rows).items()
    ]
    return f"P2P ÷ ours, by category:\n\n{grid(lines)}" if lines else ""


SHORT = {
    "all_gather": "ag",
    "all_to_all": "a2a",
    "all_reduce": "ar",
    "reduce_scatter": "rs",
    "exchange": "ex",
    "transfer": "tr",
}


def _steps(kinds: Iterable[str]) -> str:
    return "+".join(SHORT.get(kind, kind) for kind in kinds) or "copy"


def _num_ranks(layout: str) -> str:
    from rvdcomm import Layout

    return f"in {len(Layout.parse(layout).ranks)}"


def _ms(secs: float) -> str:
    return f"{secs * 1e3:.3g}" if secs < 0.9995 else f"{secs * 1e3:.0f}"


def _ratio(value: float) -> str:
    return f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"
