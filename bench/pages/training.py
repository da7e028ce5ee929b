"""Sections of pages that compare real training with torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bench.pages.text import Pictures, Result, filled
from bench.tables import Lines, markdown
from bench.training import command

OURS, MESSAGES = "auto", "auto messages"
TITLES: Mapping[str, str] = {
    OURS: "ours", "ddp": "DDP", "fsdp2": "FSDP2", "pipeline": "pipelining", "tensor": "DTensor",
}  # fmt: skip
"""Column titles, by competitor."""


def beside_torch(result: Result, pictures: Pictures) -> Iterator[str]:
    """Median step times, and our speed over that of the fastest method of torch."""
    rows = result["rows"]
    yield markdown(lines(rows))
    with_messages = [row for row in rows if {MESSAGES, "ddp"} <= row["competitors"].keys()]
    if with_messages:
        factors = [command.ratio(row, MESSAGES) or 0.0 for row in with_messages]
        shares = [_sent(row, MESSAGES) / _sent(row, "ddp") for row in with_messages]
        yield filled(
            "With messages of gloo in place of shared memory the same plans are "
            f"{_span(factors)} times as fast as the fastest of torch, and send {_span(shares)} "
            "of DDP's bytes by the kernel's count."
        )


def lines(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """A line per model and number of ranks."""
    found = [["model", "ranks", "plan that was found", *TITLES.values(), "x torch"]]
    for row in rows:
        factor = command.ratio(row, OURS)
        found.append([
            row["workload"], row["world"], row["found"].get(OURS, ""),
            *(_median_text(row, name) for name in TITLES), f"{factor:.2f} x" if factor else "-",
        ])  # fmt: skip
    return found


def _median_text(row: Mapping[str, Any], name: str) -> str:
    """The median step time of a competitor in ms; a dash if it cannot train the model."""
    seen = row["competitors"].get(name)
    return f"{1e3 * median(seen['secs']):.0f}" if seen else "-"


def _sent(row: Mapping[str, Any], name: str) -> int:
    """Bytes that all ranks send in a step."""
    return sum(row["competitors"][name]["sent_bytes"])


def _span(figures: Sequence[float]) -> str:
    return f"{min(figures):.2f} to {max(figures):.2f}"
