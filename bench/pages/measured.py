"""Sections of pages with measured times: what the commands print of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench import (
    copy,
    one_device,
    overhead,
    planning,
    prediction,
    superscaler_compile,
    superscaler_cost,
)
from bench.pages.text import Pictures, Result, Section, filled
from bench.placement import command as placement
from bench.rvd import picture, report
from bench.rvd.cases import IN_GROUP, Row
from bench.superscaler_duplex import command as duplex
from bench.superscaler_predict import command as predict
from bench.tables import markdown
from bench.training import command as training
from bench.vllm_update import command as vllm_update
from bench.weights import command as weights


def printed(text_of: Callable[[Result], str]) -> Section:
    """A section that shows what a command prints of its result."""

    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        lines = (line.rstrip() for line in text_of(result).splitlines())
        yield "\n".join(["```text", *lines, "```"])

    return section


# --- transitions --------------------------------------------------------------------------------

SIZES = ("64 KiB", "64 MiB")


def one_host(result: Result, pictures: Pictures) -> Iterator[str]:
    """The cases in one group of processes, in which data move: times, and times over ours."""
    methods = {"rvdcomm": "ours", "DTensor": "dtensor", "torch by hand": report.BY_HAND}
    titles = [f"{title}, {size}" for size in SIZES for title in methods]
    lines = [["case", *titles, "x limit", "source in the pool", "x limit"]]
    rows = {(row["category"], row["size"]): row for row in result["rows"] if _moves(row)}
    for category in dict.fromkeys(category for category, _ in rows):
        found = [report.medians_of(rows[category, size]) for size in SIZES]
        cells = [_over_ours(mine, name) for mine in found for name in methods.values()]
        # The time of small tensors is mostly waiting, so only that of large ones has a limit.
        limit, large = rows[category, SIZES[-1]]["limit_secs"], found[-1]
        line = [category, *cells, f"{large['ours'] / limit:.1f} x"]
        lines.append([*line, _ms(large["pool"]), f"{large['pool'] / limit:.1f} x"])
    yield markdown(lines)


def _moves(row: Mapping[str, Any]) -> bool:
    return bool(row["relation"] == "in group" and row["wire_bytes"])


def _over_ours(found: Mapping[str, float], name: str) -> str:
    """The time of a method and, if it is not ours, how many times ours it is."""
    if name not in found:
        return "-"
    ratio = found[name] / found["ours"]
    return _ms(found[name]) + ("" if name == "ours" else f", {ratio:.3g} x")


def _ms(secs: float) -> str:
    return f"{1e3 * secs:.3g} ms"


def ratios(result: Result) -> str:
    """The lines "up to N x" over point-to-point."""
    return report.up_to(result["rows"])


def emulated(name: str) -> Section:
    """The cases in one group over all hosts, and how far those from host to host are at most.

    If the result has times of point-to-point: the ratios to it, and the picture ``name``, too.
    """

    def section(result: Result, pictures: Pictures) -> Iterator[str]:
        inside = [row for row in result["rows"] if row["relation"] == IN_GROUP]
        yield from printed(lambda _: report.table({**result, "rows": inside}))(result, pictures)
        yield from _from_host_to_host(result["rows"])
        if ratios(result):
            yield from printed(ratios)(result, pictures)
            title = "All cases, by point-to-point and by rvdcomm"
            yield pictures.add(name, title, partial(picture.plot, result))

    return section


def _from_host_to_host(rows: Sequence[Row]) -> Iterator[str]:
    """How far the cases between groups are from the limit at most, if there are any."""
    between = [
        (report.medians_of(row)["ours"] / row["limit_secs"], row)
        for row in rows
        if row["relation"] != IN_GROUP and row["limit_secs"]
    ]
    if between:
        most, row = max(between, key=lambda each: each[0])
        yield filled(
            f"The {len(between)} cases from host to host take at most {most:.2f} x the limit "
            f"({row['category']}, {row['relation']})."
        )


# --- planning and copies ------------------------------------------------------------------------

SHOWN_RANKS = (1024, 16384)


def _planning(result: Result) -> str:
    rows = [row for row in result["rows"] if row["ranks"] in SHOWN_RANKS]
    return planning.table({**result, "rows": rows})


def _by_row(table: Callable[[Any], str]) -> Section:
    return printed(lambda result: table(result["rows"]))


def _training(rows: Sequence[Mapping[str, Any]]) -> str:
    tables = map(training.table, rows)
    return "\n\n".join([*tables, training.summary(rows), training.same_plans(rows)])


SECTIONS: Mapping[str, tuple[str, Section]] = {
    "local": ("run", printed(ratios)),
    "cluster-2x4-200mbit": (
        "run --cluster 2x4 --rate 200mbit --sizes '16 MiB' "
        "--methods ours,peer,dist,p2p,dtensor,torch",
        emulated("transfers_200mbit"),
    ),
    "cluster-2x4-1gbit": (
        "run --cluster 2x4 --rate 1gbit --only in-group --sizes '16 MiB,64 MiB' "
        "--methods ours,peer,dist,dtensor,torch",
        emulated("transfers_1gbit"),
    ),
    "cluster-2x8-40mbit": (
        "run --cluster 2x8 --rate 40mbit --sizes '1 MiB' --relations n->n --categories 'V->R' "
        "--secs 8 --repetitions 3",
        printed(report.table),
    ),
    "planning": ("planning --pairs 20", printed(_planning)),
    "copy": ("copy", printed(copy.table)),
    "copy-gpu": ("copy --only gpu --mib 256", printed(copy.table)),
    "overhead": ("overhead", _by_row(overhead.table)),
    "one_device": ("one_device --steps 50", _by_row(one_device.table)),
    "weights": ("weights --repetitions 15", printed(weights.table)),
    "vllm_update": ("vllm_update", printed(vllm_update.table)),
    "weights-2x4-200mbit": (
        "weights --cluster 2x4 --rate 200mbit --methods many,each --repetitions 3",
        printed(weights.table),
    ),
    "weights-moe-4x2-100mbit": (
        "weights --model moe-small --cluster 4x2 --readers-tp 2 --rate 100mbit --methods many",
        printed(weights.table),
    ),
    "prediction-2x4-200mbit": (
        "prediction --cluster 2x4 --rate 200mbit", printed(prediction.summary),
    ),
    "prediction-2x4-1gbit": ("prediction --cluster 2x4 --rate 1gbit", printed(prediction.summary)),
    "superscaler_compile": ("superscaler_compile", _by_row(superscaler_compile.table)),
    "superscaler_cost": (
        "superscaler_cost", printed(lambda result: "\n".join(superscaler_cost.lines_of(result))),
    ),
    "superscaler_duplex": ("superscaler_duplex", printed(duplex.table)),
    "superscaler_predict": (
        "superscaler_predict", printed(lambda result: predict.summary(result["models"])),
    ),
    "training": ("training", _by_row(_training)),
    "training-2x2-500mbit": (
        "training --cluster 2x2 --rates 500mbit --workloads waiting_gpt", _by_row(_training),
    ),
    "placement": ("placement", lambda result, _: iter([placement.table(result["cases"])])),
}  # fmt: skip
"""The command of ``bench`` and the section of each result on the page of measured times."""
