"""How long planning takes, by the number of ranks; the Python definition beside the native search.

Every sample is one `plan()` of a pair of layouts drawn at random, on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from bench.run import environment
from rvdcomm import Layout, Link, Topology, native, planner
from rvdcomm.layout import Level

DESCRIPTION = """\
Measure how long planning takes. Counted: from the call of plan() to the Plan with its path, on
one core; layouts and topology exist as values, as they do in a program that calls redistribute.
Not counted: lowering the path to a program. Of 3 cold calls the least counts: the others shared
the core. Pairs are random RVDs of a 3-d tensor of float32.

rows:
  one level      in one group, every rank with a port of its own
  three levels   in one group, ranks in hosts of 8 in racks of 32 hosts (fewer ranks: one rack)
  n -> n/2       from the first n ranks to n/2 others, on three levels
  look-up        the same call again: found in the cache
  to the text    from plan() to a path that has been printed, in one group on three levels
"""

EPILOG = """\
examples:
  python -m bench.planning                               # the table, a JSON and a plot
  python -m bench.planning --ranks 64,1024 --pairs 1000  # more pairs, fewer sizes
  RVDCOMM_NATIVE=0 python -m bench.planning              # the Python search alone
"""

SHAPE = (16384, 16384, 16384)
LINKS = (Link(3e-6, 380e9), Link(12e-6, 360e9), Link(20e-6, 5e12))
NAMES = ("rank", "host", "rack")
HOST, RACK = 8, 256
SEED = 0
REPETITIONS = 3
"""Cold calls of every pair, of which the least counts: the others shared the core."""

PYTHON_PAIRS = 20
"""Pairs that the Python search plans: it takes tens of milliseconds where many axes move."""


@dataclass(frozen=True)
class Row:
    """What one row of the table measures: ``num_dst`` is 0 if src and dst are one group."""

    name: str
    num_ranks: int
    num_levels: int
    num_dst: int = 0


def factorings(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write ``number`` as a product of ``count`` factors in order."""
    if count == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in factorings(number // d, count - 1)]


@cache
def rvds(num_ranks: int) -> list[str]:
    """Every RVD of a 3-d tensor."""
    counts = factorings(num_ranks, 2 + len(SHAPE))
    return [f"R({r})V({v})D({','.join(map(str, d))})" for r, v, *d in counts]


def topology(num_ranks: int, num_levels: int) -> Topology:
    """Runs of ranks, hosts and racks, with at least so many ranks: the last rack is whole."""
    sizes = (1, min(HOST, num_ranks), min(RACK, num_ranks))[:num_levels]
    whole = -(-num_ranks // sizes[-1]) * sizes[-1]
    levels = [
        Level(name, tuple(tuple(range(i, i + size)) for i in range(0, whole, size)), link)
        for name, size, link in zip(NAMES, sizes, LINKS, strict=False)
    ]
    return Topology(tuple(levels))


def pairs_of(row: Row, count: int) -> Iterator[tuple[Layout, Layout]]:
    """Random pairs, the same in every run."""
    rng = random.Random(SEED)
    for _ in range(count):
        src = Layout(SHAPE, rng.choice(rvds(row.num_ranks)))
        ranks = range(row.num_ranks, row.num_ranks + row.num_dst) if row.num_dst else None
        yield src, Layout(SHAPE, rng.choice(rvds(row.num_dst or row.num_ranks)), ranks)


def seconds(function: Callable[[], object], repetitions: int = 1) -> float:
    """Time of one call."""
    start = time.perf_counter()
    for _ in range(repetitions):
        function()
    return (time.perf_counter() - start) / repetitions


def measure(row: Row, num_pairs: int, core: Any, show: Callable[[float], None]) -> dict[str, Any]:
    """Samples of one row, in seconds."""
    native.core = core
    # One rack more where dst is elsewhere: src and dst then share no host.
    world = topology(row.num_ranks + max(row.num_dst, RACK if row.num_dst else 0), row.num_levels)
    samples, lookups = [], []
    for i, (src, dst) in enumerate(pairs_of(row, num_pairs)):

        def plan(src: Layout = src, dst: Layout = dst) -> planner.Plan:
            return planner.plan(src, dst, "float32", world)

        def cold(plan: Callable[[], planner.Plan] = plan) -> float:
            planner.clear_cache()
            return seconds((lambda: str(plan().path)) if row.name == "to the text" else plan)

        samples.append(min(cold() for _ in range(REPETITIONS)))
        lookups.append(seconds(plan, repetitions=200))
        show((i + 1) / num_pairs)
    return {
        "row": row.name, "ranks": row.num_ranks, "dst_ranks": row.num_dst,
        "levels": row.num_levels, "search": "native" if core else "Python",
        "samples": samples, "lookup_samples": lookups,
    }  # fmt: skip


def rows_of(all_ranks: list[int]) -> list[Row]:
    """Rows of the table."""
    return [
        *(Row("one level", n, 1) for n in all_ranks),
        *(Row("three levels", n, 3) for n in all_ranks),
        *(Row("n -> n/2", n, 3, n // 2) for n in all_ranks),
        *(Row("to the text", n, 3) for n in all_ranks if n in (all_ranks[0], 1024, 16384)),
    ]


def progress(title: str) -> Callable[[float], None]:
    """A bar on a terminal; nothing elsewhere."""

    def show(share: float) -> None:
        if sys.stderr.isatty():
            bar = "#" * round(share * 30)
            text = "" if share == 1 else f"{title:32} [{bar:30}] {share:4.0%}"
            print(f"\r{text:75}\r", end="", file=sys.stderr, flush=True)

    return show


def line_of(result: dict[str, Any]) -> str:
    """A row of the table."""
    ms = sorted(secs * 1e3 for secs in result["samples"])
    lookup_us = median(result["lookup_samples"]) * 1e6
    return (
        f"{result['row']:13}  {result['ranks']:6}  {result['search']:7} {len(ms):6}  "
        f"{median(ms):9.3f}  {ms[int(len(ms) * 0.95)]:8.3f}  {ms[-1]:8.3f}  {lookup_us:10.2f}"
    )


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Growth with the number of ranks: lines are medians, bands reach up to the worst pair."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), sharey=True, layout="constrained")
    for ax, name in zip(axes, ("one level", "three levels", "n -> n/2"), strict=True):
        for search, colour in (("native", "tab:blue"), ("Python", "tab:orange")):
            mine = [r for r in results if (r["row"], r["search"]) == (name, search)]
            if not mine:
                continue
            ranks = [r["ranks"] for r in mine]
            middle = [median(r["samples"]) * 1e3 for r in mine]
            worst = [max(r["samples"]) * 1e3 for r in mine]
            ax.plot(ranks, middle, "o-", color=colour, label=f"{search}, median")
            ax.plot(ranks, worst, ":", color=colour, label=f"{search}, worst pair")
            ax.fill_between(ranks, middle, worst, color=colour, alpha=0.12, linewidth=0)
        ax.set(xscale="log", yscale="log", ylim=(0.05, 2000), title=name, xlabel="ranks (n)")
        ax.set_xticks([8, 64, 1024, 16384], ["8", "64", "1,024", "16,384"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("cold planning, ms")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write a JSON and a plot."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks",
        default="8,16,32,64,128,256,512,1024,2048,4096,8192,16384",
        help="powers of two, comma separated (default: 8 to 16384)",
    )
    parser.add_argument("--pairs", type=int, default=300, help="pairs a row (default %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/planning.json"),
        help="result file; the plot lies beside it (default: %(default)s)",
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    print(
        f"{'':13}  {'':6}  {'':7} {'':6}  {'cold, ms':>9}  {'':8}  {'':8}  {'look-up, us':>10}\n"
        f"{'row':13}  {'ranks':>6}  {'search':7} {'pairs':>6}  {'median':>9}  {'95 %':>8}  "
        f"{'worst':>8}  {'median':>10}"
    )
    results = []
    for row in rows_of(sorted(map(int, args.ranks.split(",")))):
        for core in [native_core, None] if native_core else [None]:
            num_pairs = args.pairs if core else min(args.pairs, PYTHON_PAIRS)
            show = progress(f"{row.name}, {row.num_ranks} ranks")
            results.append(measure(row, num_pairs, core, show))
            print(line_of(results[-1]), flush=True)
    native.core = native_core
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m bench.planning", *(sys.argv[1:] if argv is None else argv)])
    args.out.write_text(json.dumps({**environment(command), "rows": results}, indent=1) + "\n")
    draw(results, args.out.with_suffix(".png"))
    print(f"wrote {args.out} and {args.out.with_suffix('.png')}")
    return 0


native_core = native.core
"""The native search, if it is built and wanted."""

if __name__ == "__main__":
    sys.exit(main())
