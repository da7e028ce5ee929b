"""Time of planning and lowering: by the number of ranks, and for models of many tensors.

A sample is one `plan()` of a pair of layouts, or one lowering of one rank's program, on one core.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench.command_line import parser_for
from bench.result import environment, write
from bench.rvd.cases import definitions
from bench.weights.models import sides
from rvdcomm import Layout, Link, Topology, native, plan_many
from rvdcomm.network import Level
from rvdcomm.plans import planner
from rvdcomm.program import Collective, Program

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

Then lowering: from a Plan to the program of one rank, plan.program_of(rank), in CPU time; of ranks
0, n/2 - 1, n/2 and n - 1 the slowest. Pairs are the 6 categories of the RVD benchmark on a matrix,
and random ones of the 3-d tensor. With executor="dist" a rank is lowered alone; with "auto" it is
lowered together with the 7 others of its host, whose memory it reads. An entry is one box that is
copied, sent or received.

Last, models of many tensors, each rank in a process of its own: planning all tensors, lowering one
rank, its peak memory with the layouts of all tensors, and printing the bundle with its costs.
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
"""Cold calls per pair; the fastest counts, because the others shared the core."""

PYTHON_PAIRS = 20
"""Pairs per row for the Python search, which takes tens of milliseconds if many axes move."""


@dataclass(frozen=True)
class Row:
    """A row of the table; ``num_dst`` is 0 if src and dst are the same group."""

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
    """Every RVD of a 3-d tensor on ``num_ranks`` ranks, as text."""
    counts = factorings(num_ranks, 2 + len(SHAPE))
    return [f"R({r})V({v})D({','.join(map(str, d))})" for r, v, *d in counts]


def topology(num_ranks: int, num_levels: int) -> Topology:
    """Ranks in hosts in racks; the last rack is full, so there may be more than ``num_ranks``."""
    sizes = (1, min(HOST, num_ranks), min(RACK, num_ranks))[:num_levels]
    whole = -(-num_ranks // sizes[-1]) * sizes[-1]
    levels = [
        Level(name, tuple(tuple(range(i, i + size)) for i in range(0, whole, size)), link)
        for name, size, link in zip(NAMES, sizes, LINKS, strict=False)
    ]
    return Topology(tuple(levels))


def pairs_of(row: Row, count: int) -> Iterator[tuple[Layout, Layout]]:
    """Random pairs of layouts, the same in every run."""
    rng = random.Random(SEED)
    for _ in range(count):
        src = Layout(SHAPE, rng.choice(rvds(row.num_ranks)))
        ranks = range(row.num_ranks, row.num_ranks + row.num_dst) if row.num_dst else None
        yield src, Layout(SHAPE, rng.choice(rvds(row.num_dst or row.num_ranks)), ranks)


def seconds(function: Callable[[], object], repetitions: int = 1) -> float:
    """Mean seconds of one call."""
    start = time.perf_counter()
    for _ in range(repetitions):
        function()
    return (time.perf_counter() - start) / repetitions


def measure(row: Row, num_pairs: int, core: Any, show: Callable[[float], None]) -> dict[str, Any]:
    """Samples of one row, in seconds."""
    native.core = core
    # With another dst group, one rack more for its ranks, so that src and dst share no host.
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


# --- lowering -----------------------------------------------------------------------------------

LOWERED_RANKS = (1024, 16384)
RANDOM_PAIRS = 6
MATRIX = SHAPE[:2]


@dataclass(frozen=True)
class LoweredRow:
    """A row of the second table: within one group, or from one half of the ranks to the other."""

    num_ranks: int
    is_between: bool
    executor: str

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{'n/2 -> n/2' if self.is_between else 'in group':10} {self.executor}"

    def pairs(self) -> Iterator[tuple[str, Layout, Layout]]:
        """(Name, src, dst) of each pair: the categories of the RVD benchmark, then random pairs."""
        rng = random.Random(SEED)
        ranks = range(self.num_ranks)
        n = self.num_ranks // 2 if self.is_between else self.num_ranks
        src, dst = ranks[:n], ranks[-n:]
        for name, texts in definitions()["categories"].items():
            a, b = (text.format(n=n, m=n) for text in texts)
            yield name, Layout(MATRIX, a, src), Layout(MATRIX, b, dst)
        for _ in range(RANDOM_PAIRS):
            a, b = rng.choice(rvds(n)), rng.choice(rvds(n))
            yield "random", Layout(SHAPE, a, src), Layout(SHAPE, b, dst)


def num_entries(program: Program) -> int:
    """The number of boxes that the instructions copy, send or receive."""
    each = (i.messages if isinstance(i, Collective) else (i,) for i in program.instructions)
    return sum(len(one.entries) for of_one in each for one in of_one)


def lowered(row: LoweredRow) -> dict[str, Any]:
    """For every pair, CPU seconds and entries of the slowest of four ranks."""
    world = topology(row.num_ranks, 3)
    samples = []
    for name, src, dst in row.pairs():
        found = []
        middle = row.num_ranks // 2
        for rank in (0, middle - 1, middle, row.num_ranks - 1):
            times = []
            for _ in range(REPETITIONS):
                planner.clear_cache()
                plan = planner.plan(src, dst, "float32", world, executor=row.executor)
                start = time.process_time()
                program = plan.program_of(rank)
                times.append(time.process_time() - start)
            found.append((min(times), num_entries(program)))
        secs, entries = max(found)
        pair = f"{name}: {src.rvd} -> {dst.rvd}"
        samples.append({"pair": pair, "secs": secs, "entries": entries})
    return {"row": row.name, "ranks": row.num_ranks, "samples": samples}


def lowered_line(result: dict[str, Any]) -> str:
    """A row of the second table."""
    ms = sorted(sample["secs"] * 1e3 for sample in result["samples"])
    worst = max(result["samples"], key=lambda sample: sample["secs"])
    return (
        f"{result['row']:16}  {result['ranks']:6}  {len(ms):6}  {median(ms):9.3f}  {ms[-1]:8.3f}  "
        f"{worst['entries']:7}  {worst['pair']}"
    )


# --- models -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelRow:
    """A model that moves from ``num_src`` ranks in stages to ``num_dst`` other ranks."""

    name: str
    num_src: int
    num_stages: int
    num_dst: int
    tp: int


MODEL_ROWS = (ModelRow("70b", 64, 4, 4, 4), ModelRow("moe-1t", 256, 8, 128, 8))


def bundled(row: ModelRow, rank: int, is_printed: bool) -> dict[str, Any]:
    """Time and memory of one rank to plan and lower all tensors; run it in a new process."""
    readers = range(row.num_src, row.num_src + row.num_dst)
    num_ranks = -(-readers.stop // HOST) * HOST
    world = Topology.hosts([range(i, i + HOST) for i in range(0, num_ranks, HOST)], *LINKS[:2])
    src, dst = sides(row.name, 1, range(row.num_src), readers, row.num_stages, row.tp)
    start = time.process_time()
    bundle = plan_many(src, dst, "bfloat16", topology=world)
    planned = time.process_time()
    programs = bundle.program_of(rank)
    done = time.process_time()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {
        "model": row.name, "src_ranks": row.num_src, "dst_ranks": row.num_dst, "rank": rank,
        "tensors": len(src), "plan_secs": planned - start, "lower_secs": done - planned,
        "peak_bytes": peak_bytes, "entries": sum(map(num_entries, programs)),
    }  # fmt: skip
    if is_printed:
        str(bundle)
        found["print_secs"] = time.process_time() - done
    return found


def bundles(row: ModelRow) -> Iterator[dict[str, Any]]:
    """Results of the first and the last rank of each side; the first also prints the bundle."""
    context = multiprocessing.get_context("spawn")
    last = row.num_src + row.num_dst - 1
    for rank in (0, row.num_src - 1, row.num_src, last):
        with context.Pool(1) as pool:
            yield pool.apply(bundled, (row, rank, rank == 0))


def bundle_line(result: dict[str, Any]) -> str:
    """A row of the third table."""
    printed = result.get("print_secs")
    return (
        f"{result['model']:8}  {result['src_ranks']:4} -> {result['dst_ranks']:<4} "
        f"{result['tensors']:7}  {result['rank']:5}  {result['plan_secs']:7.2f}  "
        f"{result['lower_secs']:8.2f}  {result['peak_bytes'] / 2**20:9.0f}  "
        f"{result['entries']:8}  " + ("" if printed is None else f"{printed:8.2f}")
    )


# --- the command --------------------------------------------------------------------------------


def rows_of(all_ranks: list[int]) -> list[Row]:
    """Rows of the table."""
    return [
        *(Row("one level", n, 1) for n in all_ranks),
        *(Row("three levels", n, 3) for n in all_ranks),
        *(Row("n -> n/2", n, 3, n // 2) for n in all_ranks),
        *(Row("to the text", n, 3) for n in all_ranks if n in (all_ranks[0], 1024, 16384)),
    ]


def progress(title: str) -> Callable[[float], None]:
    """A function that shows a progress bar on a terminal, and nothing elsewhere."""

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


HEAD = (
    f"{'':13}  {'':6}  {'':7} {'':6}  {'cold, ms':>9}  {'':8}  {'':8}  {'look-up, us':>10}\n"
    f"{'row':13}  {'ranks':>6}  {'search':7} {'pairs':>6}  {'median':>9}  {'95 %':>8}  "
    f"{'worst':>8}  {'median':>10}"
)
LOWERING_HEAD = (
    f"{'lowering':16}  {'ranks':>6}  {'pairs':>6}  {'median ms':>9}  {'worst ms':>8}  entries"
)
MODELS_HEAD = (
    f"{'model':8}  {'ranks':12} {'tensors':>7}  {'rank':>5}  {'plan, s':>7}  "
    f"{'lower, s':>8}  {'peak, MiB':>9}  {'entries':>8}  {'print, s':>8}"
)


def table(result: Mapping[str, Any]) -> str:
    """The three tables of a result."""
    parts = (
        [HEAD, *map(line_of, result["rows"])],
        [LOWERING_HEAD, *map(lowered_line, result["lowering"])],
        [MODELS_HEAD, *map(bundle_line, result["models"])],
    )
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw planning time by number of ranks; bands reach from the median to the worst pair."""
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
    """Measure, print the tables, and write a JSON file and a plot."""
    parser = parser_for("planning", DESCRIPTION, EPILOG)
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
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    print(HEAD)
    results = []
    for row in rows_of(sorted(map(int, args.ranks.split(",")))):
        for core in [native_core, None] if native_core else [None]:
            num_pairs = args.pairs if core else min(args.pairs, PYTHON_PAIRS)
            show = progress(f"{row.name}, {row.num_ranks} ranks")
            results.append(measure(row, num_pairs, core, show))
            print(line_of(results[-1]), flush=True)
    native.core = native_core
    print(f"\n{LOWERING_HEAD}")
    lowering = []
    for num_ranks in LOWERED_RANKS:
        for is_between, executor in product((False, True), ("dist", "auto")):
            lowering.append(lowered(LoweredRow(num_ranks, is_between, executor)))
            print(lowered_line(lowering[-1]), flush=True)
    print(f"\n{MODELS_HEAD}")
    models = []
    for model in MODEL_ROWS:
        for result in bundles(model):
            models.append(result)
            print(bundle_line(result), flush=True)
    found = {"rows": results, "lowering": lowering, "models": models}
    write({**environment("planning", words), **found}, args.out, partial(draw, results))
    return 0


native_core = native.core
"""The native search; None if it is not built, or not wanted (``RVDCOMM_NATIVE=0``)."""

if __name__ == "__main__":
    sys.exit(main())
